"""The frame of the HTML report: style, the hover script, and the document around the sections."""

from html import escape

STYLE = """
:root { color-scheme: light dark; --page:#f6f6f4; --card:#fff; --ink:#1d1d1b; --soft:#6b6a66;
  --rule:#e4e3df; --a:#2563eb; --b:#c2570c; --good:#15803d; --bad:#b91c1c; }
@media (prefers-color-scheme: dark) { :root { --page:#121316; --card:#1b1d22; --ink:#ececea;
  --soft:#a09f9a; --rule:#32343a; --a:#7aa7ff; --b:#f2a65a; --good:#5fd08a; --bad:#ff8a80; } }
* { box-sizing:border-box } body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif }
main { max-width:1240px; margin:0 auto; padding:28px 20px 60px }
h1 { font-size:26px; margin:0 0 4px } h2 { font-size:19px; margin:38px 0 4px }
p.lead { color:var(--soft); margin:0 0 16px; max-width:75ch }
.tiles,.charts { display:grid; gap:14px; grid-template-columns:repeat(auto-fill,minmax(215px,1fr)) }
.charts { grid-template-columns:repeat(auto-fill,minmax(min(370px,100%),1fr)) }
.card { background:var(--card); border:1px solid var(--rule); border-radius:10px; padding:14px 16px;
  min-width:0 }
.tile .name { color:var(--soft); font-size:13px }
.tile .value { font-size:23px; overflow-wrap:anywhere; font-weight:650;
  font-variant-numeric:tabular-nums } .tile .note { color:var(--soft); font-size:13px }
.up { color:var(--good) } .down { color:var(--bad) }
.card h3 { font-size:14px; margin:0; display:flex; justify-content:space-between; gap:10px }
.card h3 span { font-weight:400; color:var(--soft); font-variant-numeric:tabular-nums;
  white-space:nowrap }
.card h3 b { font-weight:600; overflow-wrap:anywhere }
.card p { color:var(--soft); font-size:12.5px; line-height:1.4; margin:3px 0 6px; min-height:2.8em;
  display:-webkit-box; -webkit-line-clamp:2; -webkit-box-orient:vertical; overflow:hidden }
.legend { font-size:12.5px; color:var(--soft) } .legend i { display:inline-block; width:14px;
  height:3px; border-radius:2px; margin:0 5px 3px 12px; vertical-align:middle }
i.a { background:var(--a) } i.b { background:var(--b) }
svg.chart { width:100%; height:auto; display:block } svg text { font-size:10.5px; fill:var(--soft) }
svg text.y { text-anchor:end } svg text.x { text-anchor:middle }
svg .grid { stroke:var(--rule); stroke-width:1 } svg .line { fill:none; stroke-width:1.8;
  stroke-linejoin:round } .line.a { stroke:var(--a) } .line.b { stroke:var(--b) }
.dots.a { fill:var(--a) } .dots.b { fill:var(--b) }
svg .cursor { stroke:var(--soft); stroke-dasharray:3 3 }
#tip { position:fixed; pointer-events:none; display:none; background:var(--ink); color:var(--page);
  border-radius:6px; padding:4px 9px; font-size:12.5px; white-space:pre }
table { border-collapse:collapse; width:100% } .scroll { overflow-x:auto }
table.samples th, table.facts th { text-align:left; font-size:13px; color:var(--soft);
  font-weight:500; padding:6px 10px; vertical-align:top }
table.samples td, table.facts td { border-top:1px solid var(--rule); padding:8px 10px;
  vertical-align:top }
table.facts th { width:190px; border-top:1px solid var(--rule) }
td.text { white-space:pre-wrap; overflow-wrap:anywhere; min-width:180px; max-width:520px;
  font:13px/1.45 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace }
td.number, table.samples th.number { text-align:right; font-variant-numeric:tabular-nums;
  white-space:nowrap }
.long { max-height:230px; overflow-y:auto }
table.bars { font-size:14px }
table.bars th { text-align:left; font-weight:500; padding:3px 12px 3px 0;
  white-space:nowrap } table.bars td.bar { width:60% } table.bars td.number { padding-left:12px }
td.bar div { background:var(--a); border-radius:3px; height:12px; min-width:2px }
details { margin-top:14px } summary { cursor:pointer; font-size:17px; font-weight:600 }
details > .charts, details > pre, details > .card { margin-top:12px }
pre { overflow-x:auto; font:13px/1.5 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace }
@media print { details { break-inside:avoid } }
"""

# Shows the numbers under the pointer. The page is complete without it.
SCRIPT = """
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg.chart")) {
  const lines = JSON.parse(svg.dataset.lines);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor"); cursor.setAttribute("y1", 10);
  cursor.setAttribute("y2", svg.viewBox.baseVal.height - 22);
  svg.addEventListener("mousemove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const near = points => points.reduce((a, b) => Math.abs(b[0]-x) < Math.abs(a[0]-x) ? b : a);
    const found = lines.map(line => [line, near(line.p)]);
    const closest = near(found.map(pair => pair[1]));
    cursor.setAttribute("x1", closest[0]); cursor.setAttribute("x2", closest[0]);
    svg.append(cursor);
    const shown = found.filter(pair => pair[1][2] === closest[2]);
    tip.textContent = "step " + closest[2] + shown.map(([line, point]) => "\\n" +
      (line.l ? line.l + "  " : "") + Number(point[3].toPrecision(6))).join("");
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  svg.addEventListener("mouseleave", () => { cursor.remove(); tip.style.display = "none"; });
}
"""


def page(title: str, sections: list[str]) -> str:
    """A whole HTML document that needs nothing but itself."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(sections)
        + f'\n</main><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def section(heading: str, lead: str, body: str) -> str:
    """A heading, one sentence for the newcomer, and the content."""
    return f'<h2>{escape(heading)}</h2><p class="lead">{escape(lead)}</p>{body}'


def folded(heading: str, body: str, *, is_open: bool = False) -> str:
    """Content that can be folded away."""
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(heading)}</summary>{body}</details>"


def facts(rows: dict[str, str]) -> str:
    """A two-column table."""
    body = "".join(
        f'<tr><th>{escape(name)}</th><td class="text">{escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    return f'<div class="card scroll"><table class="facts">{body}</table></div>'
