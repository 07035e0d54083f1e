// Shows the numbers under the pointer. The page is complete without it.
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
    tip.textContent = "step " + closest[2] + shown.map(([line, point]) => "\n" +
      (line.l ? line.l + "  " : "") + Number(point[3].toPrecision(6))).join("");
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  svg.addEventListener("mouseleave", () => { cursor.remove(); tip.style.display = "none"; });
}
