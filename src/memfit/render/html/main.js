// Put together: the data out of the page, the sections into it, and what is chosen in one of them shown in the others.

const data = JSON.parse(document.getElementById("data").textContent);
const report = data.report;
document.title = `${data.title} · memfit`;

const system = matchMedia("(prefers-color-scheme: dark)");
const followSystem = () => { document.documentElement.dataset.theme = system.matches ? "dark" : "light"; };
followSystem();

const run = data.timeline ? new Run(data.timeline) : null;
const main = make("main");
document.getElementById("page").append(topBar(data), main);
main.append(...[messages(report), outOfMemory(report), hero(report, run)].filter(Boolean));

const drawn = [];
if (run) {
  const chosen = make("div");
  const timeline = new Timeline(run, (found) => showFound(found));
  const flame = new Flame(data.timeline, report.peak.allocated_bytes);
  const table = new Allocations(run, (block) => showBlock(block, true));
  table.onSearch = (query) => flame.search(query);
  timeline.oomEvents = (report.ooms || []).map((oom) => oom.event);
  if (report.category_source === "none" && run.groupings.length > 1) timeline.useGrouping(1);
  drawn.push(timeline, flame);

  const facts = (block) => {
    const { line, module, op } = run.text(block);
    const phase = run.phaseAt(run.birth[block]);
    const never = run.death[block] >= run.events;
    return [
      ["size", size(run.bytes(block))], ["asked for", size(run.bytes(block) - run.waste[block])], ["category", run.categoryName(block)],
      ["module", module], ["made by", line ? "" : op],
      ["made", run.birth[block] < 0 ? "before the recording" : `${run.when(run.birth[block])}${phase ? `, ${phase}` : ""}`],
      ["freed", never ? "never" : `${run.when(run.death[block])}${run.phaseAt(run.death[block]) ? `, ${run.phaseAt(run.death[block])}` : ""}`],
    ].filter(([, value]) => value);
  };

  const showBlock = (block, fromTable = false) => {
    const stack = run.stack(block);
    const words = facts(block).flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]);
    chosen.replaceChildren(make("div", { class: "chosen", id: "chosen" },
      make("div", {}, make("h3", { text: run.where(block) }), make("dl", {}, words)),
      stack.length ? stackList(stack, run.text(block).line) : make("p", { class: "muted", text: "No stack was recorded for it." })));
    timeline.select(block);
    table.select(block);
    if (fromTable) timeline.toBlock(block);
  };

  const showFound = (found) => {
    if (!found) {
      chosen.replaceChildren();
      return table.select(-1);
    }
    table.setMoment(found.event);
    if (found.block >= 0) return showBlock(found.block);
    if (found.group < 0) return chosen.replaceChildren();
    const group = timeline.grouping;
    const rows = [];
    for (let block = 0; block < run.blocks && rows.length < 8; block++) {
      if (group.ofBlock[block] === found.group && run.alive(block, found.event)) rows.push(block);
    }
    const list = dataTable([["", "num"], ["", "where"]], rows.map((block) => [size(run.bytes(block)), run.where(block)]), { rowClass: () => "pick" });
    list.querySelectorAll("tbody tr").forEach((row, i) => row.addEventListener("click", () => showBlock(rows[i])));
    chosen.replaceChildren(make("div", { class: "chosen", id: "chosen" },
      make("div", {}, make("h3", { text: shortOp(group.names[found.group]) }), make("p", { class: "muted", text: `${size(group.sums[found.group][found.sample] * run.unit)} at ${found.event < 0 ? "the start" : run.when(found.event)}; its largest allocations then:` })), list));
  };

  main.append(
    make("section", { class: "card", id: "timeline" }, make("h2", { text: "Timeline" }), timeline.element, chosen),
    card("flame", "Flame graph of the peak", "from the outside in; as wide as its bytes. Click to enlarge.", flame.element),
    card("allocations", "Allocations", null, table.element));
}

main.append(...[checkpoints(report.log), nextSteps(report)].filter(Boolean));
const details = [
  shares(report, "by_code_line", "By line of code"), shares(report, "by_module", "By module"), shares(report, "by_op", "By op"), phases(report),
  temporaries(report), idleMemory(report), growthOfSteps(report), programScopes(report), recordings(report),
].filter(Boolean);
if (details.length) main.append(make("div", { class: "columns" }, details));
main.append(notes(report), make("footer", { text: "Made by memfit. This file holds everything it shows and loads nothing." }));

const redraw = () => drawn.forEach((each) => each.schedule());
addEventListener("resize", redraw);
const recolor = () => {
  Theme.forget();
  redraw();
};
system.addEventListener("change", () => {
  followSystem();
  recolor();
});
document.addEventListener("themechange", recolor);
redraw();
document.documentElement.dataset.ready = "yes";
