"""Views of the town hall's camps: which camp each member stands for."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pluralign.analysis.camps import CHANCE, CampStudy
from pluralign.cli.views.tables import figure_table, heading


def camps_page(study: CampStudy, rater_ids: CampStudy, true_features: CampStudy) -> Iterator[RenderableType]:
    """Yield the agreement of members with camps: from vote counts, with rater ids, and on true features."""
    yield heading("Which camp each member stands for")
    yield Text(
        f"All {study.people.people:,} people of the town are known, and so are their {len(study.camps)} camps. No fit "
        "saw the camps. Only the second one knows who cast which vote."
    )
    for part, title in (
        (study, "vote counts, features of the texts"),
        (rater_ids, "votes with rater ids, features of the texts"),
        (true_features, "vote counts, the true features that decide the votes"),
    ):
        yield _agreement_table(
            part,
            f"{part.represented} of {len(part.camps)} camps have a member: {title}, "
            f"{part.train_pairs:,} training pairs",
        )
        for sentence in part.sentences():
            yield Text(f"· {sentence}")
    yield Text(
        f"Chance level {_share(CHANCE)}. A member stands for a camp (bold) if it is the closest member on training "
        "prompts and agrees with it significantly more often than soft BT (5 %, corrected for the number of camps).",
        style="dim",
    )


def _agreement_table(study: CampStudy, title: str) -> Table:
    members = [str(j) for j in range(len(study.weights))]
    table = figure_table(title, "agreement with member", "people", *members, "soft BT")
    for camp in study.camps:
        cells = [Text(f" {_share(value)}", style=_shade(value, j == camp.member))
                 for j, value in enumerate(camp.agreement)]  # fmt: skip
        single = Text(f" {_share(camp.soft_bt)}", style=_shade(camp.soft_bt, False))
        table.add_row(camp.camp, f"{camp.share:.0%}", *cells, single)
    table.add_section()
    table.add_row("weight", "", *(f"{100 * weight:.0f}%" for weight in study.weights), "", style="dim")
    closest = (f"{100 * share:.0f}%" for share in study.people.closest_to)
    table.add_row("closest for", "", *closest, "", style="dim")
    table.caption = (
        f"share of {study.pairs:,} held-out pairs on which the votes of member and camp (its mean taste) are equal; "
        "closest for: share of people whose closest member it is"
    )
    return table


def _share(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


def _shade(value: float, stands_for: bool) -> str:
    """Return blue above the chance level and red below it, paler towards it."""
    pale = round(255 * (1 - min(1.0, abs(value - CHANCE) / CHANCE)))
    colour = f"rgb({pale},{(255 + pale) // 2},255)" if value >= CHANCE else f"rgb(255,{pale},{pale})"
    return f"{'bold underline ' if stands_for else ''}black on {colour}"
