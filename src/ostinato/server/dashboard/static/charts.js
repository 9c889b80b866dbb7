// Two charts of the overview, drawn by uPlot from one JSON of columns.
"use strict";
(() => {
  const NAMES = {
    arena: "memory", shared: "shared tier", recalled: "recalled", non_prefix: "moved",
    exact: "kept answer", semantic: "like answer",
  };
  const colour = (name) => window.ostinato.colour(name);
  const faint = (name) => colour(name).replace("rgb(", "rgba(").replace(")", ", 0.4)");
  const percent = (share) => (share == null ? "–" : `${Math.round(share * 100)} %`);
  const seconds = (value) => {
    if (value == null) return "–";
    if (value < 0.0095) return `${Number((value * 1000).toFixed(1))} ms`;
    return value < 0.9995 ? `${Math.round(value * 1000)} ms` : `${value < 10 ? value.toFixed(2) : Math.round(value)} s`;
  };

  const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  const times = { values: (u, ticks) => ticks.map(clock), space: 70 };

  const axis = (values, more) => ({
    stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false },
    font: "12px system-ui, sans-serif", ...(values ? { values } : {}), ...more,
  });
  // A line needs two points: a value with none beside it is a dot.
  const alone = (u, series) => {
    const values = u.data[series];
    return [...values.keys()].filter((i) => values[i] != null && values[i - 1] == null && values[i + 1] == null);
  };
  const base = (place, series, axes, scales) => ({
    width: Math.max(200, place.clientWidth), height: 220, series, axes, scales,
    cursor: { points: { size: 6 }, drag: { x: false, y: false } },
    legend: { live: true }, padding: [10, 8, 0, 0],
  });

  // Layers lie on one another: each is drawn up to the sum of those below it, the topmost first.
  const stacked = (picture) => {
    const layers = Object.keys(picture.layers);
    const sums = [];
    let below = picture.t.map(() => 0);
    for (const layer of layers) {
      below = below.map((sum, i) => (picture.layers[layer][i] == null ? null : (sum ?? 0) + picture.layers[layer][i]));
      sums.push(below);
    }
    return { layers: layers.reverse(), columns: [picture.t, ...sums.reverse()] };
  };

  const layerChart = (place, picture) => {
    const { layers, columns } = stacked(picture);
    const series = [{ label: "time", value: (u, t) => (t == null ? "–" : new Date(t * 1000).toLocaleTimeString()) }];
    for (const layer of layers) {
      series.push({
        label: NAMES[layer], stroke: colour(layer), fill: faint(layer), width: 1.5, points: { size: 5, fill: colour(layer), filter: alone },
        value: (u, _, s, i) => percent(i == null ? null : u.picture.layers[layer][i]),
      });
    }
    const axes = [axis(null, times), axis((u, ticks) => ticks.map(percent), { size: 52 })];
    return new uPlot(base(place, series, axes, { y: { range: [0, 1] } }), columns, place);
  };

  const ttftChart = (place, picture) => {
    const series = [
      { label: "time", value: (u, t) => (t == null ? "–" : new Date(t * 1000).toLocaleTimeString()) },
      { label: "cold", stroke: colour("cold-line"), width: 2, points: { size: 5, fill: colour("cold-line"), filter: alone }, spanGaps: true, value: (u, v) => seconds(v) },
      { label: "warm", stroke: colour("warm-line"), width: 2, points: { size: 5, fill: colour("warm-line"), filter: alone }, spanGaps: true, value: (u, v) => seconds(v) },
    ];
    const isRound = (t) => /^[125]0*$/.test(t.toPrecision(3).replace(".", "").replace(/^0+/, ""));
    const marks = (u, ticks) => ticks.map((t) => (t > 0 && isRound(t) ? seconds(t) : ""));
    const axes = [axis(null, times), axis(marks, { size: 58 })];
    const range = (u, low, high) => (low == null ? [0.01, 10] : [low / 2, high * 2]);
    return new uPlot(base(place, series, axes, { y: { distr: 3, range } }), [picture.t, picture.cold, picture.warm], place);
  };

  const start = () => {
    const box = document.querySelector("[data-series]");
    const places = [document.getElementById("chart-layers"), document.getElementById("chart-ttft")];
    if (!box || places.includes(null)) return;
    let charts = [];
    let picture = null;
    let layout = "";
    const draw = () => {
      charts.forEach((chart) => chart.destroy());
      charts = [layerChart(places[0], picture), ttftChart(places[1], picture)];
      charts.forEach((chart) => { chart.picture = picture; });
      layout = Object.keys(picture.layers).join();
    };
    const update = async () => {
      if (window.ostinato.rests() && picture) return;
      try {
        const answer = await fetch(box.dataset.series, { headers: { accept: "application/json" } });
        if (!answer.ok) return;
        picture = await answer.json();
      } catch {
        return; // the server is away: the last picture stays
      }
      if (!charts.length || Object.keys(picture.layers).join() !== layout) return draw();
      charts.forEach((chart) => { chart.picture = picture; });
      charts[0].setData(stacked(picture).columns);
      charts[1].setData([picture.t, picture.cold, picture.warm]);
      return undefined;
    };
    update();
    setInterval(update, 3000);
    document.addEventListener("ostinato:theme", () => picture && draw());
    new ResizeObserver(() => {
      charts.forEach((chart, i) => chart.setSize({ width: Math.max(200, places[i].clientWidth), height: 220 }));
    }).observe(box);
  };
  document.addEventListener("DOMContentLoaded", start);
})();
