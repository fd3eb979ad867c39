"use strict";
// Draws the figures whose data stand in the page, keeps their controls, and sorts tables. No text from data is markup.

// Buttons over a figure would always hide its corner where nothing hovers, as on phones.
const BUTTONS = matchMedia("(hover: hover)").matches ? "hover" : false;
const CONFIG = {displayModeBar: BUTTONS, displaylogo: false, responsive: true, plotlyServerURL: "", showTips: false,
  modeBarButtonsToRemove: ["sendChartToCloud", "lasso2d", "select2d", "autoScale2d", "toggleSpikelines"]};
const DARK = document.documentElement.classList.contains("dark");
const FADED = DARK ? "#464c53" : "#dedede";
const MARK = "#00E5FF";  // outlines the busiest
const INK = "#222222";  // on a bright mark
// Colours of lines and text that a dark page would hide.
const ON_DARK = {[INK]: "#e4e6e8", "#000000": "#ffffff", "#5b5b5b": "#a7adb3", "#e3e3e3": "#3a4047", "#c8c8c8": "#59616a",
  "#d5d5d5": "#474e56"};
const NODE_SIDE = 0.48;  // of the distance between neighbours

const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const copy = (value) => JSON.parse(JSON.stringify(value));
const onDark = (key, value) => {
  if (key === "layout") return {...value, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)"};
  return typeof value === "string" ? ON_DARK[value] ?? value : value;
};

function make(tag, attributes = {}, ...children) {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
}

// A labelled choice; `change` is called with the index of the option.
function choice(controls, label, names, chosen, change) {
  const select = make("select", {}, ...names.map((name) => make("option", {textContent: name})));
  select.selectedIndex = chosen;
  select.addEventListener("change", () => change(select.selectedIndex));
  controls.append(make("label", {}, label, select));
  return select;
}

// A figure as it is, with one choice at most.
async function drawPlain({figure, choices}, {controls, plot}) {
  await Plotly.newPlot(plot, figure.data, figure.layout, CONFIG);
  if (!choices || choices.options.length < 2) return;
  choice(controls, choices.label, choices.options.map((option) => option.name), 0,
    (index) => Plotly.restyle(plot, copy(choices.options[index].update)));
}

// A machine under one or two names, with one slider over frames.
async function drawLoads(data, {controls, plots, plot}) {
  let frame = 0;
  const chosen = data.shown.slice();
  const panels = chosen.map((_, panel) => {
    const canvas = panel ? make("div", {className: "plot"}) : plot;
    const heading = make("div", {className: "controls"});
    choice(heading, "shown", data.names, chosen[panel], (index) => { chosen[panel] = index; update(); });
    plots.append(make("div", {className: "panel"}, heading, canvas));
    return canvas;
  });
  const largest = (values) => Math.max(...chosen.map((name) => values[name].flat().reduce((a, b) => Math.max(a, b), 0))) || 1;
  const marks = (values, marked, usual) => {
    const top = values.indexOf(Math.max(...values));
    return values.map((value, at) => (at === top && value > 0 ? marked : usual));
  };
  const update = () => Promise.all(panels.map((panel, at) => {
    const name = chosen[at], node = data.node[name][frame], link = data.link[name][frame];
    const [nodeMax, linkMax] = [largest(data.node), largest(data.link)];
    const {xaxis} = panel._fullLayout, unit = Math.abs(xaxis.l2p(1) - xaxis.l2p(0)) * data.spacing;
    const side = Math.max(unit * NODE_SIDE, 5), readable = side >= 9 + 4 * String(node.length - 1).length;
    return Plotly.restyle(panel, {
      "marker.color": [node, link], "marker.cmax": [nodeMax, linkMax],
      "marker.size": [side, link.map((value) => Math.max(unit * (0.1 + 0.08 * value / linkMax), 4))],
      "mode": [readable ? "markers+text" : "markers", "markers"],
      "textfont.color": [node.map((value) => (value > nodeMax / 2 ? "#fff" : INK)), INK],
      "marker.line.color": [marks(node, MARK, "#fff"), marks(link, MARK, "#9a9a9a")],
      "marker.line.width": [marks(node, 3, 0), marks(link, 2, 0.3)],
    }, [1, 2]);
  }));
  const fit = (panel) => { panel.style.height = `${Math.round(Math.min(Math.max(panel.clientWidth * data.extent[1] / data.extent[0], 150), 560) + 110)}px`; };
  for (const panel of panels) {
    fit(panel);
    const {data: traces, layout} = copy(data.figure);
    if (DARK) layout.plot_bgcolor = "#d9dde1";  // the busiest are the darkest
    await Plotly.newPlot(panel, traces, layout, CONFIG);
  }
  if (data.frames.length > 1) {
    const told = make("output", {textContent: data.frames[0]});
    const slider = make("input", {type: "range", min: 0, max: data.frames.length - 1, value: 0, ariaLabel: "frame"});
    slider.addEventListener("input", () => { frame = Number(slider.value); told.textContent = data.frames[frame]; update(); });
    controls.append(make("label", {className: "slider"}, slider, told));
  }
  await update();
  let width = panels[0].clientWidth;
  new ResizeObserver(() => {
    if (panels[0].clientWidth === width) return;
    width = panels[0].clientWidth;
    panels.forEach(fit);
    Promise.all(panels.map((panel) => Plotly.Plots.resize(panel))).then(update);
  }).observe(panels[0]);
}

// A column as an axis: names by their index, or numbers on their scale.
function axisOf(column) {
  const title = {"title.text": safe(column.label)};
  if (column.names) {
    return {...title, type: "linear", tickvals: column.names.map((_, at) => at), ticktext: column.names.map(safe),
      range: [-0.6, column.names.length - 0.4]};
  }
  return {...title, type: column.scale, tickvals: null, ticktext: null, autorange: true};
}
const told = (column, row) => (column.names ? column.names[column.values[row]] : column.values[row] ?? "-");
const described = (columns, row) => columns.map((column) => `${safe(column.label)}: ${safe(told(column, row))}`).join("<br>");
const prefixed = (axis, name) => Object.fromEntries(Object.entries(axis).map(([key, value]) => [`${name}.${key}`, value]));

// Winners over two columns.
async function drawMap(data, {controls, plot}) {
  const rows = data.strategies.map((_, at) => data.winner.flatMap((winner, row) => (winner === at ? [row] : [])));
  const at = [0, Math.min(1, data.columns.length - 1)];
  const spread = (row, axis) => (((row + 1) * (axis ? 0.7548777 : 0.5698403)) % 1 - 0.5) * 0.7;  // even, and the same each time
  const place = (axis) => rows.map((own) => own.map((row) => {
    const column = data.columns[at[axis]];
    if (at[0] === at[1] && axis) return spread(row, 1);
    return column.names ? column.values[row] + spread(row, axis) : column.values[row];
  }));
  const text = (own) => own.map((row) => `${described(data.columns, row)}<br>next behind by ${data.behind[row] ?? "-"} %`);
  const traces = rows.map((own, strategy) => ({type: "scatter", mode: "markers", name: safe(data.strategies[strategy]), x: [], y: [],
    text: text(own), hovertemplate: "%{fullData.name}<br>%{text}<extra></extra>",
    marker: {color: data.colours[strategy], size: data.winner.length > 500 ? 5 : 8, symbol: strategy % 8, opacity: 0.85}}));
  await Plotly.newPlot(plot, traces, data.figure.layout, CONFIG);
  const update = () => {
    const y = at[0] === at[1] ? {"title.text": "", type: "linear", tickvals: [], range: [-1, 1]} : axisOf(data.columns[at[1]]);
    return Plotly.update(plot, {x: place(0), y: place(1)}, {...prefixed(axisOf(data.columns[at[0]]), "xaxis"), ...prefixed(y, "yaxis")});
  };
  if (data.columns.length > 1) {
    ["across", "up"].forEach((label, axis) => choice(controls, label, data.columns.map((column) => column.label), at[axis],
      (index) => { at[axis] = index; update(); }));
  }
  await update();
}

const hasWebGL = () => Boolean(document.createElement("canvas").getContext("webgl"));

// A plane of two metrics and parallel coordinates, which show the same selection.
async function drawLinked(data, {figure, controls, plots, plot, later}) {
  const count = data.hash.length, all = [...Array(count).keys()];
  const pair = data.first.slice();
  const lines = make("div", {className: "plot parallel"}), status = make("output", {className: "selected"});
  let boxed = null, brushed = null;  // rows selected in the plane, and along axes; null is all
  let painted = null;  // those in the plane that the lines have their colours for; ranges along axes fade by themselves

  const metric = (name) => data.columns[data.metrics.find((each) => each.name === name).column];
  const own = data.strategies.names.map((_, at) => all.filter((row) => data.strategies.values[row] === at));
  const front = () => (data.fronts.find(({pair: names}) => names.join() === pair.join()) ??
    data.fronts.find(({pair: names}) => names.join() === [...pair].reverse().join())).rows;
  const selected = () => all.filter((row) => (!boxed || boxed.has(row)) && (!brushed || brushed.has(row)));

  const traces = own.map((rows, at) => ({type: "scatter", mode: "markers", name: safe(data.strategies.names[at]), x: [], y: [],
    customdata: rows, text: rows.map((row) => described(data.columns, row)),
    hovertemplate: "%{fullData.name}<br>%{text}<extra></extra>",
    marker: {color: data.colours[at], size: count > 1000 ? 4 : 7, symbol: at % 8},
    unselected: {marker: {color: FADED, opacity: 0.35}}, selected: {marker: {opacity: 1}}}));
  traces.push({type: "scatter", mode: "lines", name: "Pareto front", x: [], y: [], hoverinfo: "skip",
    line: {color: data.front_colour, width: 1.5}});
  await Plotly.newPlot(plot, traces, data.figure.layout, CONFIG);

  const place = () => {
    const [x, y] = pair.map(metric), pick = (column) => [...own, front()].map((rows) => rows.map((row) => column.values[row]));
    boxed = null;
    return Plotly.update(plot, {x: pick(x), y: pick(y)},
      {...prefixed(axisOf(x), "xaxis"), ...prefixed(axisOf(y), "yaxis"), selections: []}).then(show);
  };

  // Positions along an axis of the parallel coordinates: logarithms where the scale is one.
  const height = (column) => column.values.map((value) => (column.scale === "log" && value !== null ? Math.log10(value) : value));
  const ticks = (column) => {
    if (column.names) return {tickvals: column.names.map((_, at) => at), ticktext: column.names.map(safe)};
    if (column.scale !== "log") return {};
    const heights = height(column).filter((value) => value !== null), low = heights.reduce((a, b) => Math.min(a, b));
    const high = heights.reduce((a, b) => Math.max(a, b)), marks = [0, 1, 2, 3, 4].map((step) => low + (high - low) * step / 4);
    return {tickvals: marks, ticktext: marks.map((mark) => String(Number((10 ** mark).toPrecision(2))))};
  };
  const steps = [FADED, ...data.colours], scale = steps.flatMap((colour, at) => [[at / steps.length, colour], [(at + 1) / steps.length, colour]]);
  const side = (column) => Math.max(44, 24 + 6 * Math.max(...(column.names ?? []).map((name) => name.length)));
  const broken = (label) => safe(label).replace(/ \[/, "<br>[");
  const colour = () => data.strategies.values.map((strategy, row) => (!painted || painted.has(row) ? strategy + 1 : 0));
  async function drawLines() {
    await Plotly.newPlot(lines, [{type: "parcoords", labelfont: {size: 11}, rangefont: {size: 1, color: "rgba(0,0,0,0)"},
      dimensions: data.columns.map((column) => ({label: broken(column.label), values: height(column), ...ticks(column)})),
      line: {color: colour(), colorscale: scale, cmin: -0.5, cmax: steps.length - 0.5},
      unselected: {line: {color: FADED, opacity: 0.15}}}],
    {...copy(data.figure.layout), margin: {l: side(data.columns[0]), r: side(data.columns.at(-1)), t: 56, b: 24}}, CONFIG);
    lines.on("plotly_restyle", brush);
  }
  if (hasWebGL()) {
    lines.style.minWidth = `${120 * data.columns.length}px`;
    plots.append(make("div", {className: "wide"}, lines));
    later(drawLines);  // it may take seconds where no GPU draws
  } else {
    plots.append(make("p", {textContent: "Parallel coordinates need WebGL, which this browser does not have."}));
  }

  function brush(changed) {
    if (!Object.keys(changed[0]).some((key) => key.includes("constraintrange"))) return;
    const limits = lines.data[0].dimensions.flatMap((dimension, at) => {
      const range = dimension.constraintrange;
      return range && range.length ? [[height(data.columns[at]), Array.isArray(range[0]) ? range : [range]]] : [];
    });
    brushed = limits.length ? new Set(all.filter((row) => limits.every(([values, ranges]) =>
      ranges.some(([low, high]) => values[row] >= low && values[row] <= high)))) : null;
    show();
  }
  plot.on("plotly_selected", (event) => {
    boxed = event && event.points.length ? new Set(event.points.map((point) => point.customdata)) : null;
    show();
  });
  plot.on("plotly_deselect", () => { boxed = null; show(); });

  const table = make("tbody"), heads = ["point", "strategy", ...data.columns.map((column) => column.label)];
  const heading = make("tr", {}, ...heads.map((name) => {
    const head = make("th", {scope: "col"}, make("button", {type: "button", textContent: name}));
    head.setAttribute("aria-sort", "none");
    return head;
  }));
  figure.append(make("p", {className: "caption"}, status), make("div", {className: "scroll", tabIndex: 0}, make("table", {}, make("thead", {}, heading), table)));

  async function show() {
    const rows = selected(), shown = new Set(rows), everything = rows.length === count;
    const listed = everything ? front() : rows.slice().sort((a, b) => metric(pair[0]).values[a] - metric(pair[0]).values[b]);
    status.textContent = everything ? `All ${count} points are selected; the table has the Pareto front.`
      : `${rows.length} of ${count} points are selected${rows.length > 200 ? "; the table has the first 200" : ""}.`;
    table.replaceChildren(...listed.slice(0, 200).map((row) => make("tr", {}, make("td", {textContent: data.hash[row]}),
      make("td", {textContent: data.strategies.names[data.strategies.values[row]]}),
      ...data.columns.map((column) => {
        const cell = make("td", {textContent: told(column, row), className: column.names ? "" : "number"});
        if (!column.names) cell.dataset.value = column.values[row];
        return cell;
      }))));
    await Plotly.restyle(plot, {selectedpoints: own.map((mine) => (everything ? null : mine.flatMap((row, at) => (shown.has(row) ? [at] : []))))},
      own.map((_, at) => at));
    if (painted === boxed) return;
    painted = boxed;
    if (lines.data) await Plotly.restyle(lines, {"line.color": [colour()]});
  }

  ["across", "up"].forEach((label, axis) => choice(controls, label, data.metrics.map((each) => each.name),
    data.metrics.findIndex((each) => each.name === pair[axis]), (index) => {
      const name = data.metrics[index].name;
      if (pair[1 - axis] === name) pair[1 - axis] = pair[axis];  // the two change places
      pair[axis] = name;
      controls.querySelectorAll("select").forEach((select, which) => { select.selectedIndex = data.metrics.findIndex((each) => each.name === pair[which]); });
      place();
    }));
  const clear = make("button", {type: "button", textContent: "Select all"});
  clear.addEventListener("click", async () => {
    boxed = brushed = null;
    if (lines.data) await Plotly.restyle(lines, Object.fromEntries(data.columns.map((_, at) => [`dimensions[${at}].constraintrange`, null])));
    await Plotly.relayout(plot, {selections: []});
    show();
  });
  controls.append(clear);
  await place();
}

// Tables: numbers by value, text as text, empty cells last.
document.addEventListener("click", (event) => {
  const head = event.target.closest("th");
  if (!head) return;
  const table = head.closest("table"), body = table.tBodies[0], at = [...head.parentNode.children].indexOf(head);
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const each of head.parentNode.children) each.setAttribute("aria-sort", each === head ? order : "none");
  const sign = order === "ascending" ? 1 : -1, key = (row) => row.children[at];
  const rows = [...body.rows].map((row) => ({row, text: key(row).textContent, value: Number(key(row).dataset.value ?? NaN)}));
  rows.sort((a, b) => {
    if (a.text === "-" || b.text === "-") return (a.text === "-") - (b.text === "-");
    const numbers = !Number.isNaN(a.value) && !Number.isNaN(b.value);
    return sign * (numbers ? a.value - b.value : a.text.localeCompare(b.text, undefined, {numeric: true}));
  });
  body.append(...rows.map(({row}) => row));
});

const DRAWN_BY = {plain: drawPlain, loads: drawLoads, map: drawMap, linked: drawLinked};

(async () => {
  const data = JSON.parse(document.getElementById("figures").textContent, DARK ? onDark : undefined);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
  const last = [];
  const attempt = async (key, figure, draw) => {
    await new Promise((done) => setTimeout(done));  // the page answers between figures
    try {
      await draw();
    } catch (error) {
      console.error(key, error);
      figure.append(make("p", {className: "note", textContent: `This figure could not be drawn: ${error}`}));
    }
  };
  for (const [key, each] of Object.entries(data)) {
    const figure = document.getElementById(key), plots = figure.querySelector(".plots");
    const later = (draw) => last.push(() => attempt(key, figure, draw));
    const parts = {figure, plots, later, controls: figure.querySelector(".controls"), plot: plots.querySelector(".plot")};
    await attempt(key, figure, () => DRAWN_BY[each.kind](each, parts));
  }
  for (const draw of last) await draw();
  document.body.dataset.drawn = "yes";
})();
