"""Cost of encoding or scoring 1M, 100M and 1B pairs with MiniLM and with an 8B backbone.

    python benchmarks/cost_sheet.py [DATA] [--texts-per-pair 2] [--tokens-per-text 500] [--json]

Measured: the number of distinct texts per pair of DATA and of tokens per text; the operations per token, counted by
torch in MiniLM and in a Llama-3-8B without weights; the speed of MiniLM on one core, and its share of the peak speed of
matrix products. Assumed, not measured: the H100 and its utilisation (``costs.py``). DATA is anything that ``pluralign
fit`` reads (default: the town hall). The tokenizer of SmolLM2 counts the tokens of a decoder; its vocabulary is smaller
than that of Llama-3, so real counts are slightly lower. The two options give the sizes of other data.
"""

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from sentence_transformers import SentenceTransformer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pluralign import load_preferences
from pluralign.experiments import costs
from pluralign.learning.routes import LLAMA_3_8B
from pluralign.text import surface
from pluralign.text.encoders import encode, load_encoder
from pluralign.text.loading import smollm2_folder
from pluralign.text.options import MIDDLE
from pluralign.text.transformer import DECODER_MAX_TOKENS, ModelEncoder
from pluralign.votes.preferences import texts_of
from pluralign.votes.prompts import Item, chat_messages, plain_text

PAIRS = (1_000_000, 100_000_000, 1_000_000_000)
GEMM = 1536
COUNTED_TOKENS = 128
LLAMA_LAYERS = round(LLAMA_3_8B.layers * MIDDLE)
PRECISIONS = {"bf16": costs.H100_FLOPS, "fp32": costs.H100_FP32_FLOPS}
MODELS = ("minilm", "llama")
MINILM_TOKENS = 256


def main() -> None:
    """Measure, estimate, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="demo:2000")
    parser.add_argument("--texts", type=int, default=128, help="number of texts for the measurement of this machine")
    parser.add_argument("--texts-per-pair", type=float, help="distinct texts per pair (default: measured on DATA)")
    parser.add_argument(
        "--tokens-per-text", type=float, help="tokens per text (default: measured on DATA); MiniLM reads at most 256"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    votes = load_preferences(arguments.data)
    items = texts_of(votes)
    measured: dict[str, Any] = {"data": votes.name or arguments.data, "texts_per_pair": len(items) / len(votes)}
    measured |= measure_minilm(items[: arguments.texts]) | measure_llama(items[: arguments.texts])
    assumed: dict[str, float] = {}
    if arguments.texts_per_pair:
        assumed["texts_per_pair"] = arguments.texts_per_pair
    if tokens := arguments.tokens_per_text:
        assumed |= {"minilm_tokens_per_text": min(tokens, MINILM_TOKENS), "llama_tokens_per_text": tokens}
    sheet = [row for model in MODELS for row in estimate_cost(model, measured | assumed)]
    if arguments.json:
        print(json.dumps({"measured": measured, "assumed": assumed, "sheet": sheet}))
    else:
        show(measured, assumed, sheet)


def measure_minilm(items: list[Item]) -> dict[str, float]:
    """Return tokens per text, operations per token, and the speed of MiniLM on one core relative to the peak."""
    encoder = load_encoder("minilm")
    assert isinstance(encoder, ModelEncoder)
    model = SentenceTransformer(str(encoder.folder))
    tokens = int(model.preprocess([plain_text(*item) for item in items])["attention_mask"].sum())
    length = round(tokens / len(items))
    ids = torch.ones((1, length), dtype=torch.long)
    # Plain attention: torch does not count the operations of the fused attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    torch.set_num_threads(1)
    encode(items[:8], encoder, surface=False, cache=False)
    seconds = timed(lambda: encode(items, encoder, surface=False, cache=False))
    matrix = torch.rand(GEMM, GEMM)
    peak = 2.0 * GEMM**3 / min(timed(lambda: matrix @ matrix) for _ in range(5))
    flops = counter.get_total_flops() / length
    return {
        "minilm_tokens_per_text": tokens / len(items),
        "minilm_flops_per_token": flops,
        "minilm_formula_flops_per_token": costs.encoding_flops(costs.MINILM, 1, length),
        "core_tokens_per_second": tokens / seconds,
        "core_share_of_gemm_peak": flops * tokens / seconds / peak,
    }


def measure_llama(items: list[Item]) -> dict[str, float]:
    """Return tokens per text of a decoder, and operations per token in the kept layers of Llama-3-8B."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder())
    texts = [tokenizer.apply_chat_template(chat_messages(*item), tokenize=False) for item in items]
    lengths = [min(len(ids), DECODER_MAX_TOKENS) for ids in tokenizer(texts)["input_ids"]]
    size = LLAMA_3_8B
    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=LLAMA_LAYERS,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
    )
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        transformers.LlamaModel(config)(torch.ones((1, COUNTED_TOKENS), dtype=torch.long))
    return {
        "llama_tokens_per_text": sum(lengths) / len(lengths),
        "llama_layers": LLAMA_LAYERS,
        "llama_flops_per_token": counter.get_total_flops() / COUNTED_TOKENS,
        "llama_formula_flops_per_token": costs.encoding_flops(size, 1, COUNTED_TOKENS, LLAMA_LAYERS),
    }


def estimate_cost(model: str, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one model: one per number of pairs, with the hours in both precisions."""
    narrow = model == "minilm"
    shares = {"bf16": costs.NARROW_UTILISATION if narrow else costs.TRAINING_UTILISATION}
    rows = []
    for pairs in PAIRS:
        estimates = {
            precision: costs.encoding_cost(
                pairs,
                costs.MINILM if narrow else LLAMA_3_8B,
                texts_per_pair=sizes["texts_per_pair"],
                tokens_per_text=sizes[f"{model}_tokens_per_text"],
                layers=None if narrow else LLAMA_LAYERS,
                surface=len(surface.NAMES),
                peak=peak,
                utilisation=shares.get(precision, costs.TRAINING_UTILISATION),
            )
            for precision, peak in PRECISIONS.items()
        }
        row: dict[str, Any] = {"model": model, **asdict(estimates["bf16"])}
        del row["gpu_hours"]
        row |= {f"gpu_hours_{precision}": cost.gpu_hours for precision, cost in estimates.items()}
        if narrow:
            row["core_hours_here"] = row["tokens"] / sizes["core_tokens_per_second"] / 3600
        rows.append(row)
    return rows


def timed(work: Any) -> float:
    """Return the duration of a call in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def show(measured: dict[str, Any], assumed: dict[str, float], sheet: list[dict[str, Any]]) -> None:
    """Print the measured and assumed figures, and the sheet."""
    console = Console(width=120)
    for name, value in measured.items():
        other = f" (estimate uses {assumed[name]:g})" if name in assumed else ""
        console.print(f"{name}: {value if isinstance(value, str) else f'{value:,.3g}'}{other}", highlight=False)
    table = Table(box=box.SIMPLE)
    columns = (
        "pairs",
        "texts",
        "tokens",
        "FLOP",
        "disk, GB",
        "H100-hours, BF16",
        "H100-hours, FP32",
        "core-hours here",
    )
    for name in ("model", *columns):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in sheet:
        counts = [f"{row[name]:.2g}" for name in ("pairs", "texts", "tokens", "flops")]
        hours = [f"{row[name]:,.2f}" for name in ("gpu_hours_bf16", "gpu_hours_fp32")]
        here = f"{row['core_hours_here']:,.0f}" if "core_hours_here" in row else ""
        table.add_row(row["model"], *counts, f"{row['stored_bytes'] / 1e9:,.0f}", *hours, here)
    console.print(table)


if __name__ == "__main__":
    main()
