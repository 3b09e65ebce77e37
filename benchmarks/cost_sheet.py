"""What encoding, or scoring, 1M, 100M and 1B pairs costs with MiniLM and with an 8B backbone.

    python benchmarks/cost_sheet.py [DATA] [--texts-a-pair 2] [--tokens-a-text 500] [--json]

Measured here: how many distinct texts a pair of DATA brings and how many tokens a text has; the operations of a token,
counted by torch in the real MiniLM and in a Llama-3-8B without weights; how fast one core reads with MiniLM, and what
share of its matrix-product peak that is. Stated, not measured: the H100 and its utilisation (``costs.py``). DATA is
what ``pluralign fit`` reads; the demo town hall unless given. A decoder's tokens are counted by SmolLM2's tokenizer,
whose vocabulary is smaller than Llama-3's: real counts are a little lower. Other data is reckoned with the two options.
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
from pluralign.ensemble.ensemble import texts_of
from pluralign.experiments import costs
from pluralign.features import surface
from pluralign.features.encoder import encode, load_encoder
from pluralign.features.transformer_encoder import DECODER_DEPTH, DECODER_MAX_TOKENS, ModelEncoder
from pluralign.models.bundled import smollm2_folder
from pluralign.votes.prompts import Item, chat_messages, plain_text

PAIRS = (1_000_000, 100_000_000, 1_000_000_000)
GEMM = 1536
COUNTED_TOKENS = 128
LLAMA_LAYERS = round(costs.LLAMA_3_8B.layers * DECODER_DEPTH)
PRECISIONS = {"bf16": costs.H100_FLOPS, "fp32": costs.H100_FP32_FLOPS}
MODELS = ("minilm", "llama")
MINILM_TOKENS = 256


def main() -> None:
    """Measure, reckon, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="demo:2000")
    parser.add_argument("--texts", type=int, default=128, help="texts that are read to measure this machine")
    parser.add_argument("--texts-a-pair", type=float, help="distinct texts a pair brings, instead of DATA's")
    parser.add_argument("--tokens-a-text", type=float, help="tokens of a text, instead of DATA's; MiniLM reads 256")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    votes = load_preferences(arguments.data)
    items = texts_of(votes)
    measured: dict[str, Any] = {"data": votes.name or arguments.data, "texts_a_pair": len(items) / len(votes)}
    measured |= measure_minilm(items[: arguments.texts]) | measure_llama(items[: arguments.texts])
    stated: dict[str, float] = {}
    if arguments.texts_a_pair:
        stated["texts_a_pair"] = arguments.texts_a_pair
    if tokens := arguments.tokens_a_text:
        stated |= {"minilm_tokens_a_text": min(tokens, MINILM_TOKENS), "llama_tokens_a_text": tokens}
    sheet = [row for model in MODELS for row in estimate_cost(model, measured | stated)]
    if arguments.json:
        print(json.dumps({"measured": measured, "stated": stated, "sheet": sheet}))
    else:
        show(measured, stated, sheet)


def measure_minilm(items: list[Item]) -> dict[str, float]:
    """Return tokens a text, operations a token, and this machine's speed with MiniLM beside its peak; one thread."""
    encoder = load_encoder("minilm")
    assert isinstance(encoder, ModelEncoder)
    model = SentenceTransformer(str(encoder.folder))
    tokens = int(model.preprocess([plain_text(*item) for item in items])["attention_mask"].sum())
    length = round(tokens / len(items))
    ids = torch.ones((1, length), dtype=torch.long)
    # Plain attention: torch does not count the operations of the fused one of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    torch.set_num_threads(1)
    encode(items[:8], encoder, surface=False, cache=False)
    seconds = timed(lambda: encode(items, encoder, surface=False, cache=False))
    matrix = torch.rand(GEMM, GEMM)
    peak = 2.0 * GEMM**3 / min(timed(lambda: matrix @ matrix) for _ in range(5))
    flops = counter.get_total_flops() / length
    return {
        "minilm_tokens_a_text": tokens / len(items),
        "minilm_flops_a_token": flops,
        "minilm_formula_flops_a_token": costs.encoding_flops(costs.MINILM, 1, length),
        "core_tokens_a_second": tokens / seconds,
        "core_share_of_gemm_peak": flops * tokens / seconds / peak,
    }


def measure_llama(items: list[Item]) -> dict[str, float]:
    """Return a decoder's tokens a text, and the operations a token costs in the layers that are kept of Llama-3-8B."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder())
    texts = [tokenizer.apply_chat_template(chat_messages(*item), tokenize=False) for item in items]
    lengths = [min(len(ids), DECODER_MAX_TOKENS) for ids in tokenizer(texts)["input_ids"]]
    size = costs.LLAMA_3_8B
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
        "llama_tokens_a_text": sum(lengths) / len(lengths),
        "llama_layers": LLAMA_LAYERS,
        "llama_flops_a_token": counter.get_total_flops() / COUNTED_TOKENS,
        "llama_formula_flops_a_token": costs.encoding_flops(size, 1, COUNTED_TOKENS, LLAMA_LAYERS),
    }


def estimate_cost(model: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sheet's rows of one model: each number of pairs, with the hours in both precisions."""
    narrow = model == "minilm"
    shares = {"bf16": costs.NARROW_UTILISATION if narrow else costs.TRAINING_UTILISATION}
    rows = []
    for pairs in PAIRS:
        reckoned = {
            precision: costs.encoding_cost(
                pairs,
                costs.MINILM if narrow else costs.LLAMA_3_8B,
                texts_a_pair=facts["texts_a_pair"],
                tokens_a_text=facts[f"{model}_tokens_a_text"],
                layers=None if narrow else LLAMA_LAYERS,
                surface=len(surface.NAMES),
                peak=peak,
                utilisation=shares.get(precision, costs.TRAINING_UTILISATION),
            )
            for precision, peak in PRECISIONS.items()
        }
        row: dict[str, Any] = {"model": model, **asdict(reckoned["bf16"])}
        del row["gpu_hours"]
        row |= {f"gpu_hours_{precision}": cost.gpu_hours for precision, cost in reckoned.items()}
        if narrow:
            row["core_hours_here"] = row["tokens"] / facts["core_tokens_a_second"] / 3600
        rows.append(row)
    return rows


def timed(work: Any) -> float:
    """Return the seconds that work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def show(measured: dict[str, Any], stated: dict[str, float], sheet: list[dict[str, Any]]) -> None:
    """Print what was measured and stated, and the sheet."""
    console = Console(width=120)
    for name, value in measured.items():
        instead = f", reckoned with {stated[name]:g}" if name in stated else ""
        console.print(f"{name}: {value if isinstance(value, str) else f'{value:,.3g}'}{instead}", highlight=False)
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
