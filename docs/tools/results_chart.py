"""Draw docs/results.svg from the tables of examples/README.md; a script without arguments.

The tables hold what runs came to; tests/test_docs.py fails where the picture shows other numbers.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "examples" / "README.md"
PICTURE = ROOT / "docs" / "results.svg"
COLOURS = ("#3b78b4", "#c98a1b", "#3f8f3b")
WIDTH, HEIGHT, TOP, BOTTOM = 960, 330, 58, 282
LEFT = (52, 440)  # where the curves stand
RIGHT = (590, 930)  # where the bars stand


def rows(text: str, header: str) -> list[list[str]]:
    """The cells of the table whose header line begins with ``header``."""
    lines = text[text.index(header) :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def curves(text: str) -> list[list[float]]:
    """Accuracy by step, a list for each seed."""
    table = rows(text, "| step | seed 1 |")
    return [[float(row[column]) for row in table] for column in range(1, len(table[0]))]


def shares(text: str) -> list[tuple[str, float, float, float]]:
    """Model, its share of right answers, and the ends of the 95 % interval."""
    found = []
    for row in rows(text, "| model | made from |"):
        numbers = re.match(r"([\d.]+) \[([\d.]+), ([\d.]+)\]", row[2])
        if numbers:
            share, low, high = map(float, numbers.groups())
            found.append((row[0].strip("`"), share, low, high))
    return found


def label(x: float, y: float, text: str, anchor: str = "middle", style: str = "") -> str:
    """Text at a place; ``style``: further attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{text}</text>'


def height(share: float) -> float:
    """Ordinate of a share of 0 to 1."""
    return BOTTOM - share * (BOTTOM - TOP)


def draw_curves(seeds: list[list[float]]) -> list[str]:
    """The left panel."""
    begin, end = LEFT
    steps = len(seeds[0])
    places = [begin + index * (end - begin) / (steps - 1) for index in range(steps)]
    made = [label(begin - 32, 24, "PPO: accuracy of 64 sampled answers a step", "start", TITLE)]
    for share in (0, 0.25, 0.5, 0.75, 1):
        made.append(f'<path d="M{begin} {height(share):.1f}H{end}" stroke="#ddd"/>')
        made.append(label(begin - 8, height(share) + 4, f"{share:g}", "end"))
    made += [label(x, BOTTOM + 18, str(step)) for step, x in enumerate(places, 1)]
    made.append(label((begin + end) / 2, BOTTOM + 38, "step"))
    for seed, (shares_of_seed, colour) in enumerate(zip(seeds, COLOURS, strict=True), 1):
        points = zip(places, map(height, shares_of_seed), strict=True)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        made.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        made.append(
            label(end - 190 + 70 * (seed - 1), 44, f"seed {seed}", "start", f'fill="{colour}"')
        )
    return made


def draw_shares(models: list[tuple[str, float, float, float]]) -> list[str]:
    """The right panel."""
    begin, end = RIGHT
    pitch = (BOTTOM - TOP) / len(models)
    made = [
        label(begin - 70, 24, "Pipeline: right answers to 256 held-out prompts", "start", TITLE)
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = begin + share * (end - begin)
        made.append(f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="#ddd"/>')
        made.append(label(x, BOTTOM + 18, f"{share:g}"))
    for index, (name, share, low, high) in enumerate(models):
        y = TOP + (index + 0.5) * pitch
        x, x_low, x_high = (begin + value * (end - begin) for value in (share, low, high))
        colour = "#9a9a9a" if index == 0 else COLOURS[0]
        made.append(
            f'<rect x="{begin}" y="{y - 9:.1f}" width="{x - begin:.1f}" height="18" '
            f'fill="{colour}"/>'
        )
        made.append(
            f'<path d="M{x_low:.1f} {y:.1f}H{x_high:.1f}" stroke="#222" stroke-width="1.5"/>'
        )
        made.append(label(begin - 8, y + 4, name, "end"))
        made.append(label(x_high + 6, y + 4, f"{share:.3f}", "start"))
    made.append(label((begin + end) / 2, BOTTOM + 38, "share, and its 95 % interval"))
    return made


TITLE = 'font-size="15" font-weight="bold" fill="#222"'


def picture() -> str:
    """The SVG."""
    text = TABLES.read_text()
    seeds, models = curves(text), shares(text)
    said = (
        f"Accuracy of PPO over {len(seeds[0])} steps, {len(seeds)} seeds; "
        f"right answers of {len(models)} models of the pipeline"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#444" role="img" '
            'aria-labelledby="title">',
            f'<title id="title">{said}</title>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            *draw_curves(seeds),
            *draw_shares(models),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
