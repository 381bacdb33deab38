"""Draw the pictures of these pages: `python docs/diagrams.py` writes `docs/images/*.svg`.

The SVG files are committed, so that building the site needs no drawing. `tests/test_docs.py` compares them with what
this script draws. A picture is at most 480 units wide and its text 13 units high, so that a phone shows it legibly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent / "images"
WIDTH = 480
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"

MONOSPACE = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

PROMPT = "class Queue:\n    def __init__(self"
# `pair.text_by_step` of the bundled pair, 64 greedy tokens in float32. The first piece is prefill's token.
TEXT_BY_STEP = (
    ",",
    " name, mode=None, name",
    "=None, name",
    '=None):\n        """Con',
    "struct a Termin",
    "al instance.\n\n        The name of",
    " the name is a string, and a",
    " tuple of\n        or None",
    " if the name is not None.\n        ",
    '"""\n        self.name = name\n        ',
    "self._name",
    " = name",
)

INK, FAINT, LINE = "#1f2937", "#6b7280", "#94a3b8"
COMMITTED, ANCHOR, DRAFT, REJECTED, BONUS, EMPTY, MODEL = (
    "#bfdbfe",
    "#fde68a",
    "#bbf7d0",
    "#fecaca",
    "#ddd6fe",
    "#ffffff",
    "#e2e8f0",
)


class Picture:
    """Shapes on a white sheet, which stays white in a dark theme."""

    def __init__(self, height: int, title: str):
        self.height, self.title = height, title
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        fill: str = INK,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *lines: str,
        size: float = 13,
        dashed: bool = False,
        radius: float = 4,
    ) -> None:
        """Draw a box with lines of text in its middle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
            f'stroke="{LINE}"{dash}/>'
        )
        top = y + height / 2 - (len(lines) - 1) * (size + 4) / 2 + size * 0.35
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + i * (size + 4), line, size=size)

    def cells(
        self,
        x: float,
        y: float,
        values: list[tuple[str, str]],
        width: float = 34,
        height: float = 30,
    ) -> None:
        """Draw a row of cells, each a fill and a word."""
        for i, (fill, word) in enumerate(values):
            self.box(x + i * width, y, width, height, fill, word, radius=0)

    def line(self, *points: tuple[float, float], arrow: bool = True, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{FAINT}" stroke-width="1.5"{end}{dash}/>'
        )

    def svg(self) -> str:
        """Return the file."""
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'font-family="{FONT}" role="img">\n<title>{escape(self.title)}</title>\n'
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{FAINT}"/></marker></defs>\n'
            f'<rect width="{WIDTH}" height="{self.height}" rx="6" fill="#ffffff"/>\n{body}\n</svg>\n'
        )


def step() -> Picture:
    p = Picture(476, "One step: draft, verify, accept, commit, and back to draft")
    x, w = 20, 300
    phases = [
        (20, "1  draft", "the drafter proposes tokens after the anchor"),
        (122, "2  verify", "the target reads anchor and drafts in one pass"),
        (244, "3  accept", "compare: keep a prefix, add one token"),
        (366, "4  commit", "move the lengths, tell the drafter"),
    ]
    heights = (76, 96, 96, 76)
    for (y, name, words), h in zip(phases, heights, strict=True):
        p.box(x, y, w, h, MODEL)
        p.text(x + 12, y + 22, name, anchor="start", bold=True, size=14)
        p.text(x + 12, y + 41, words, anchor="start", size=12, fill=FAINT)
    cell = dict(width=30, height=22)
    p.cells(x + 12, 68, [(ANCHOR, "a"), *[(DRAFT, f"d{i}") for i in (1, 2, 3, 4)]], **cell)
    p.cells(x + 12, 170, [(ANCHOR, "a"), *[(DRAFT, f"d{i}") for i in (1, 2, 3, 4)]], **cell)
    p.text(x + 12, 210, "target's choice:  d1  d2  x", anchor="start", size=12)
    p.cells(
        x + 12,
        292,
        [(DRAFT, "d1"), (DRAFT, "d2"), (REJECTED, "d3"), (REJECTED, "d4"), (BONUS, "x")],
        **cell,
    )
    p.text(x + 12, 332, "2 accepted + 1 bonus token = 3 tokens", anchor="start", size=12)
    p.cells(
        x + 12, 414, [(COMMITTED, "a"), (COMMITTED, "d1"), (COMMITTED, "d2"), (ANCHOR, "x")], **cell
    )
    for top, bottom in ((96, 122), (218, 244), (340, 366)):
        p.line((x + w / 2, top), (x + w / 2, bottom - 1))
    p.line((x + w / 2, 442), (x + w / 2, 462), (8, 462), (8, 58), (x - 1, 58))
    p.box(345, 24, 120, 68, EMPTY, "drafter's", "own state", dashed=True, size=12)
    p.line((344, 58), (x + w + 1, 58))
    p.box(
        345, 122, 120, 96, EMPTY, "target's caches", "K/V of", "every layer", dashed=True, size=12
    )
    p.line((x + w + 1, 150), (344, 150))
    p.line((344, 186), (x + w + 1, 186))
    p.text(405, 140, "written", size=11, fill=FAINT)
    p.text(405, 208, "read", size=11, fill=FAINT)
    p.box(345, 366, 120, 76, EMPTY, "lengths, anchor,", "output tokens", dashed=True, size=12)
    p.line((x + w + 1, 404), (344, 404))
    p.line((x + w + 1, 384), (333, 384), (333, 70), (344, 70), dashed=True)
    p.text(405, 250, "features of the", size=11, fill=FAINT)
    p.text(405, 265, "kept tokens go to", size=11, fill=FAINT)
    p.text(405, 280, "the drafter", size=11, fill=FAINT)
    return p


def accepted() -> Picture:
    title = f"{len(TEXT_BY_STEP) - 1} verify steps wrote this text; plain decoding needs 63"
    p = Picture(268, title)
    p.text(14, 26, title, anchor="start", bold=True)
    colours = (COMMITTED, DRAFT, ANCHOR, BONUS, REJECTED)
    fills = [MODEL, *(colours[i % len(colours)] for i in range(len(TEXT_BY_STEP) - 1))]
    pieces = [(EMPTY, PROMPT), *zip(fills, TEXT_BY_STEP, strict=True)]
    width, height, left, top, row, column = 6.7, 20, 14, 42, 0, 0
    for fill, piece in pieces:
        for i, part in enumerate(piece.split("\n")):
            if i:
                row, column = row + 1, 0
            words = part.lstrip() if column == 0 else part  # no colour under an indentation
            column += len(part) - len(words)
            if words:
                x, y = left + column * width, top + row * height
                p.parts.append(
                    f'<rect x="{x:g}" y="{y:g}" width="{len(words) * width:g}" height="{height - 3}" '
                    f'rx="2" fill="{fill}"/>\n'
                    f'<text x="{x:g}" y="{y + 13:g}" font-size="11" fill="{INK}" xml:space="preserve" '
                    f'font-family="{MONOSPACE}" textLength="{len(words) * width:g}">'
                    f"{escape(words)}</text>"
                )
                column += len(words)
    p.box(left, 240, 14, 14, MODEL, radius=2)
    p.text(left + 20, 252, "prefill's token", size=12, anchor="start", fill=FAINT)
    p.text(
        left + 120,
        252,
        "then a colour for each verify step; the prompt is white",
        size=12,
        anchor="start",
        fill=FAINT,
    )
    return p


def rollback() -> Picture:
    p = Picture(378, "A rejected draft's K/V stays in its slot and is overwritten by the next step")
    old = [(COMMITTED, "the"), (COMMITTED, "cat"), (COMMITTED, "sat")]
    rows = [
        ("before the step: length 3, the anchor is not in the cache", old, 3, 5),
        (
            "verify wrote anchor and drafts: length still 3",
            [*old, (ANCHOR, "on"), (DRAFT, "the"), (DRAFT, "big"), (DRAFT, "red")],
            3,
            1,
        ),
        (
            "commit: “the” was accepted, “big” was not: length 5",
            [*old, (COMMITTED, "on"), (COMMITTED, "the"), (REJECTED, "big"), (REJECTED, "red")],
            5,
            1,
        ),
        (
            "next step: its anchor and drafts overwrite the two",
            [
                *old,
                (COMMITTED, "on"),
                (COMMITTED, "the"),
                (ANCHOR, "mat"),
                (DRAFT, "and"),
                (DRAFT, "it"),
            ],
            5,
            0,
        ),
    ]
    w, x = 50, 28
    for i, (words, cells, length, _) in enumerate(rows):
        y = 34 + i * 84
        p.text(x, y - 12, words, anchor="start", size=13, bold=True)
        filled = cells + [(EMPTY, "")] * (8 - len(cells))
        p.cells(x, y, filled, width=w)
        p.line((x + length * w, y - 5), (x + length * w, y + 38), arrow=False)
        p.text(x + length * w, y + 51, f"length {length}", size=11, fill=FAINT)
    p.text(x, 372, "slot 0", size=11, fill=FAINT, anchor="start")
    p.text(x + 8 * w, 372, "slot 7", size=11, fill=FAINT, anchor="end")
    return p


def ring() -> Picture:
    p = Picture(330, "A ring of window and slack: position p lives in slot p mod R")
    cx, cy, r, hole, n, window = 160, 165, 130, 82, 16, 10
    newest, drafts = 21, 4

    def at(angle: float, radius: float) -> tuple[float, float]:
        return cx + radius * math.sin(angle), cy - radius * math.cos(angle)

    held = {}
    for position in range(newest + drafts + 1):
        held[position % n] = position
    for slot in range(n):
        a0, a1 = (2 * math.pi * (slot + k) / n for k in (0, 1))
        position = held[slot]
        fill = COMMITTED
        if position > newest:
            fill = DRAFT
        elif position == newest:
            fill = ANCHOR
        elif position <= newest - window:
            fill = EMPTY
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = at(a0, r), at(a1, r), at(a1, hole), at(a0, hole)
        p.parts.append(
            f'<path d="M{x0:.1f},{y0:.1f} A{r},{r} 0 0 1 {x1:.1f},{y1:.1f} L{x2:.1f},{y2:.1f} '
            f'A{hole},{hole} 0 0 0 {x3:.1f},{y3:.1f} z" fill="{fill}" stroke="{LINE}"/>'
        )
        tx, ty = at((a0 + a1) / 2, (r + hole) / 2)
        p.text(tx, ty + 4, str(position), size=12)
        tx, ty = at((a0 + a1) / 2, r + 14)
        p.text(tx, ty + 4, str(slot), size=10, fill=FAINT)
    p.text(cx, cy - 8, "R = 16 slots", size=13)
    p.text(cx, cy + 10, "window 10, slack 6", size=12, fill=FAINT)
    for i, (fill, words) in enumerate(
        (
            (COMMITTED, "in the window"),
            (ANCHOR, "anchor, position 21"),
            (DRAFT, "drafts, 22 to 25"),
            (EMPTY, "past the window"),
        )
    ):
        y = 80 + i * 34
        p.box(322, y, 18, 18, fill)
        p.text(348, y + 14, words, anchor="start", size=12)
    p.text(322, 232, "Rejected drafts hide", anchor="start", size=12, fill=FAINT)
    p.text(322, 248, "no key that a later", anchor="start", size=12, fill=FAINT)
    p.text(322, 264, "query still sees.", anchor="start", size=12, fill=FAINT)
    return p


def pages() -> Picture:
    p = Picture(262, "The tables of two rows list pages of one pool; both begin with pages 7 and 2")
    w, x, y, number = 44, 20, 108, 10
    shared = dict.fromkeys((7, 2), ANCHOR)
    tables = [
        ("row 1: 230 tokens", 34, {**shared, 9: COMMITTED, 4: COMMITTED}),
        ("row 2: 150 tokens", 182, {**shared, 5: DRAFT}),
    ]
    fills = {page: fill for _, _, table in tables for page, fill in table.items()}
    p.cells(x, y, [(fills.get(page, EMPTY), str(page)) for page in range(number)], width=w)
    for side, (words, top, table) in zip((-1, 1), tables, strict=True):
        p.cells(x, top, [(fill, str(page)) for page, fill in table.items()], width=w)
        p.text(x + 4 * w + 12, top + 20, words, anchor="start")
        near, far = (top + 30, y - 1) if side < 0 else (top, y + 31)
        for i, page in enumerate(table):
            shift = 8 * side if page in shared else 0
            p.line((x + (i + 0.5) * w, near), (x + (page + 0.5) * w + shift, far))
    p.text(
        x, 22, "entry s // 64 of a table: the page of slot s", size=12, fill=FAINT, anchor="start"
    )
    p.text(460, 168, "the pages of a layer", size=12, fill=FAINT, anchor="end")
    kinds = [(COMMITTED, "row 1"), (DRAFT, "row 2"), (ANCHOR, "both: a prefix"), (EMPTY, "neither")]
    for i, (fill, words) in enumerate(kinds):
        p.box(x + i * 90 + (40 if i == 3 else 0), 232, 14, 14, fill)
        p.text(x + 20 + i * 90 + (40 if i == 3 else 0), 243, words, size=12, anchor="start")
    return p


def dflash() -> Picture:
    p = Picture(
        420, "DFlash: features of target layers become keys and values; one pass fills all masks"
    )
    p.text(20, 24, "context: once for each kept token", anchor="start", bold=True)
    p.box(20, 40, 120, 150, MODEL)
    p.text(80, 60, "target", bold=True)
    for i, words in enumerate(("layer 27", "layer 11", "layer 1")):
        p.box(34, 72 + i * 38, 92, 28, COMMITTED, words, size=12)
        p.line((126, 86 + i * 38), (168, 114))
    p.box(170, 84, 110, 60, EMPTY, "join, one matrix,", "norm: context", size=12)
    p.line((280, 114), (318, 114))
    p.box(
        320, 76, 140, 76, COMMITTED, "cached K and V", "of each of the", "5 draft layers", size=12
    )
    p.text(20, 222, "draft: one pass a step", anchor="start", bold=True)
    block = [(ANCHOR, "anchor"), *[(EMPTY, "mask")] * 4]
    p.cells(20, 238, block, width=58)
    p.text(330, 258, "… 15 masks", anchor="start", size=12, fill=FAINT)
    p.line((165, 268), (165, 291))
    p.box(
        20,
        292,
        290,
        50,
        MODEL,
        "5 draft layers: queries of the block",
        "see the context and the block",
        size=12,
    )
    p.line((440, 152), (440, 317), (312, 317))
    p.line((165, 342), (165, 367))
    p.text(178, 359, "the target's own head", anchor="start", size=11, fill=FAINT)
    p.cells(20, 368, [(EMPTY, ""), *[(DRAFT, f"d{i}") for i in (1, 2, 3, 4)]], width=58)
    p.text(330, 388, "… 15 drafts", anchor="start", size=12, fill=FAINT)
    return p


def mtp() -> Picture:
    p = Picture(
        400, "MTP: an assistant drafts token by token from the target's own keys and values"
    )
    p.box(20, 30, 440, 62, COMMITTED)
    p.text(240, 52, "the target's caches: last sliding and last full layer", size=13)
    p.text(240, 74, "frozen while a step drafts; the assistant writes nothing", size=12, fill=FAINT)
    for i in range(3):
        x = 20 + i * 155
        p.line((x + 65, 92), (x + 65, 128))
        p.box(x, 130, 130, 58, MODEL, "4 assistant layers", "queries only", size=12)
        first = "anchor" if i == 0 else f"d{i}"
        p.cells(x, 240, [(ANCHOR if i == 0 else DRAFT, first), (BONUS, "state")], width=65)
        p.line((x + 65, 239), (x + 65, 190))
        p.text(
            x + 65,
            290,
            ("E(a), hidden", "E(d1), state 1", "E(d2), state 2")[i],
            size=11,
            fill=FAINT,
        )
        p.box(x, 330, 130, 30, DRAFT, f"draft d{i + 1}")
        if i < 2:
            p.line((x + 130, 159), (x + 143, 159), (x + 143, 255), (x + 154, 255))
    for i in range(3):
        x = 20 + i * 155
        p.line(
            (x + 118, 188),
            (x + 118, 230),
            (x + 136, 230),
            (x + 136, 318),
            (x + 65, 318),
            (x + 65, 329),
        )
    p.text(
        20,
        384,
        "E: the target's embedding. hidden: the target's last hidden state.",
        anchor="start",
        size=12,
        fill=FAINT,
    )
    return p


def tree() -> Picture:
    p = Picture(430, "A draft tree, the path that the target follows, and who sees whom")
    nodes = {
        0: (240, 50, "anchor", ANCHOR),
        1: (110, 120, "1", DRAFT),
        2: (240, 120, "2", COMMITTED),
        3: (370, 120, "3", DRAFT),
        4: (60, 190, "4", DRAFT),
        5: (200, 190, "5", DRAFT),
        6: (280, 190, "6", COMMITTED),
        7: (280, 260, "7", DRAFT),
    }
    parents = {1: 0, 2: 0, 3: 0, 4: 1, 5: 2, 6: 2, 7: 6}
    for child, parent in parents.items():
        (x0, y0, *_), (x1, y1, *_) = nodes[parent], nodes[child]
        p.line((x0, y0 + 15), (x1, y1 - 16))
    for x, y, word, fill in nodes.values():
        p.box(x - 30, y - 15, 60, 30, fill, word, radius=15)
    for y, words in ((124, "level 1"), (194, "level 2"), (264, "level 3")):
        p.text(470, y, words, anchor="end", size=11, fill=FAINT)
    p.text(20, 30, "the target follows 2, then 6", anchor="start", bold=True)
    p.text(20, 252, "7 is not its choice:", anchor="start", size=12, fill=FAINT)
    p.text(20, 268, "its own is the bonus", anchor="start", size=12, fill=FAINT)
    p.text(20, 304, "row sees column", anchor="start", bold=True)

    def sees(row: int) -> set[int]:
        found = {row}
        while row:
            row = parents[row]
            found.add(row)
        return found

    size, left, top = 12, 160, 318
    for row in range(8):
        seen = sees(row)
        p.text(
            left - 8, top + row * size + 10, "a" if row == 0 else str(row), size=10, anchor="end"
        )
        p.text(left + row * size + 6, top - 4, "a" if row == 0 else str(row), size=10)
        for column in range(8):
            p.box(
                left + column * size,
                top + row * size,
                size,
                size,
                COMMITTED if column in seen else EMPTY,
                radius=0,
            )
    p.text(280, 340, "A row sees the cache, its", anchor="start", size=12, fill=FAINT)
    p.text(280, 356, "ancestors and itself,", anchor="start", size=12, fill=FAINT)
    p.text(280, 372, "and no other branch.", anchor="start", size=12, fill=FAINT)
    return p


def residual() -> Picture:
    p = Picture(
        310, "The residual distribution is what the target has more than the draft, normalised"
    )
    target, draft = (0.45, 0.25, 0.15, 0.1, 0.05), (0.25, 0.45, 0.1, 0.15, 0.05)
    rest = [max(0.0, a - b) for a, b in zip(target, draft, strict=True)]
    total = sum(rest)
    panels = (
        ("p: the target", target, COMMITTED),
        ("q: the draft", draft, DRAFT),
        ("residual", [x / total for x in rest], BONUS),
    )
    for i, (words, values, fill) in enumerate(panels):
        x, base = 16 + i * 155, 240
        p.text(x + 70, 28, words, size=12, bold=True)
        for j, value in enumerate(values):
            height = value * 230
            p.box(x + j * 28, base - height, 24, height, fill, radius=0)
            p.text(
                x + j * 28 + 12, base - height - 5, f"{value:.2f}".lstrip("0"), size=10, fill=FAINT
            )
            p.text(x + j * 28 + 12, base + 15, "ABCDE"[j], size=12)
    p.text(
        16,
        278,
        "A draft B is accepted with probability .25 / .45.",
        anchor="start",
        size=12,
    )
    p.text(16, 296, "If it is refused, the residual gives A or C.", anchor="start", size=12)
    return p


def layers() -> Picture:
    p = Picture(486, "Who calls whom: imports go from the top to the bottom")
    rows = (
        ("commands · serving", "the command line · the HTTP server"),
        ("api", "load, Pair: text in, text out"),
        ("engine · rollout", "a queue of requests · a function of arrays"),
        ("runtime", "compiled programs, prefill passes, memory"),
        ("decode · state", "the algorithm, and what a slot holds"),
        ("drafters · models", "DFlash, MTP · Gemma 4, Qwen3"),
        ("weights · registry", "checkpoints to arrays · kinds of model"),
        ("quantised · configs", "8 and 4 bits · config.json"),
        ("verify · sampling · cache", "arrays alone, no model"),
        ("pallas_kernels", "GPU kernels beside their plain twins"),
    )
    for i, (name, words) in enumerate(rows):
        y = 14 + i * 47
        p.box(20, y, 440, 36, MODEL if i != 4 else ANCHOR)
        p.text(32, y + 23, name, anchor="start", bold=True, size=13)
        p.text(448, y + 23, words, anchor="end", size=11, fill=FAINT)
        if i:
            p.line((240, y - 11), (240, y - 1))
    return p


PICTURES: tuple[Callable[[], Picture], ...] = (
    accepted,
    step,
    rollback,
    ring,
    pages,
    dflash,
    mtp,
    tree,
    residual,
    layers,
)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for draw in PICTURES:
        (IMAGES / f"{draw.__name__}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
