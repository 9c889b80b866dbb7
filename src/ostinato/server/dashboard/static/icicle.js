// The prefix tree as an icicle on a canvas: drawn wide to narrow, walked by mouse or by keys, told in words.
"use strict";
(() => {
  const ROW = 27;
  const GAP = 1;
  const MIN_WIDTH = 1.5;
  const MAX_ROWS = 16;
  const ZOOM_MS = 220;

  const number = (n) => n.toLocaleString("en");
  const share = (part, whole) => (whole ? `${(100 * part / whole).toFixed(part < whole / 100 ? 1 : 0)} %` : "–");

  class Icicle {
    constructor(box) {
      this.box = box;
      this.canvas = box.querySelector("canvas");
      this.said = document.getElementById("icicle-said");
      this.crumbs = document.getElementById("crumbs");
      this.colourBy = "uses";
      this.pictures = []; // each looks closer at a node of the one before
      this.view = { start: 0, width: 1 };
      this.drawn = [];
      this.readColours();
      box.addEventListener("keydown", (event) => this.onKey(event));
      box.addEventListener("mousemove", (event) => this.onMove(event));
      box.addEventListener("mouseleave", () => this.hover(-1));
      box.addEventListener("click", (event) => this.onClick(event));
      box.addEventListener("dblclick", () => this.open(this.selected));
      box.addEventListener("focus", () => this.draw());
      box.addEventListener("blur", () => this.draw());
      new ResizeObserver(() => this.draw()).observe(box);
      document.addEventListener("ostinato:theme", () => { this.readColours(); this.draw(); });
      for (const pick of document.querySelectorAll(".pick")) {
        pick.addEventListener("click", () => this.pickColour(pick));
      }
      const root = new URLSearchParams(location.search).get("root");
      this.load(root && /^\d+$/.test(root) ? root : "");
    }

    readColours() {
      const names = ["heat-0", "heat-1", "heat-2", "heat-3", "rail", "surface", "ink", "accent", "soft"];
      this.colours = Object.fromEntries(names.map((name) => [name, window.ostinato.colour(name)]));
      this.ramp = [0, 1, 2, 3].map((i) => this.colours[`heat-${i}`].match(/\d+/g).slice(0, 3).map(Number));
    }

    pickColour(pick) {
      this.colourBy = pick.dataset.colour;
      for (const other of document.querySelectorAll(".pick")) {
        other.setAttribute("aria-pressed", String(other === pick));
      }
      document.getElementById("ramp-words").textContent =
        this.colourBy === "uses" ? "seldom to often used" : "long ago to just now";
      this.draw();
    }

    // ---------------------------------------------------------- data

    async load(root) {
      let picture;
      try {
        const answer = await fetch(this.box.dataset.url + (root ? `?root=${root}` : ""));
        if (!answer.ok) throw new Error(String(answer.status));
        picture = await answer.json();
      } catch {
        this.said.textContent = root && !this.pictures.length ? "This node has gone." : "The picture could not be loaded.";
        if (root && !this.pictures.length) this.load("");
        return;
      }
      this.pictures.push(arrange(picture));
      this.zoomed = this.top();
      this.selected = this.zoomed;
      this.view = { start: 0, width: 1 };
      this.box.dataset.ready = String(picture.id.length);
      this.zoomTo(this.zoomed, true);
    }

    get picture() { return this.pictures[this.pictures.length - 1]; }

    // With one namespace only, "everything" says nothing: begin below it.
    top() {
      const { children, id } = this.picture;
      return id[0] === 0 && children[0].length === 1 ? children[0][0] : 0;
    }

    // ---------------------------------------------------------- words

    label(node) {
      const { labels, id, tokens } = this.picture;
      return labels[node] || (id[node] ? `${number(tokens[node])} tokens` : "namespace");
    }

    tell(node) {
      const p = this.picture;
      if (node < 0 || !p) return "";
      if (!p.total[0]) return "Nothing is cached yet: the tree grows with the first request.";
      const whole = p.total[this.zoomed];
      const words = [`${number(p.total[node])} tokens, ${share(p.total[node], whole)} of what is shown`];
      if (p.id[node]) {
        words.push(`${number(p.tokens[node])} of its own`, `used ${number(p.uses[node])} times`, `last ${number(p.ago[node])} look-ups ago`);
        if (p.pinned[node]) words.push("pinned");
      }
      const below = p.children[node].length;
      words.push(below ? `goes on in ${number(below)} way${below > 1 ? "s" : ""}` : "nothing goes on from it");
      if (p.left_out[node]) words.push(`${number(p.left_out[node])} small nodes left out`);
      return `${this.label(node)}: ${words.join(", ")}.`;
    }

    say(node) { this.said.textContent = this.tell(node); }

    // ---------------------------------------------------------- moving

    zoomTo(node, isAtOnce) {
      const p = this.picture;
      const from = { ...this.view };
      const to = { start: p.start[node] / p.total[0], width: Math.max(p.total[node], 1) / Math.max(p.total[0], 1) };
      this.zoomed = node;
      this.selected = node;
      this.say(node);
      this.showCrumbs();
      this.showTable(p.id[node]);
      this.box.style.height = `${ROW * Math.max(5, Math.min(MAX_ROWS, 1 + p.height[node]))}px`;
      if (isAtOnce || matchMedia("(prefers-reduced-motion: reduce)").matches) {
        this.view = to;
        this.depth = p.depth[node];
        this.draw();
        return;
      }
      const began = performance.now();
      const fromDepth = this.depth;
      const step = (now) => {
        const t = Math.min(1, (now - began) / ZOOM_MS);
        const eased = 1 - (1 - t) ** 3;
        const mix = (a, b) => a + (b - a) * eased;
        this.view = { start: mix(from.start, to.start), width: mix(from.width, to.width) };
        this.depth = mix(fromDepth, p.depth[node]);
        this.draw();
        if (t < 1 && this.zoomed === node) requestAnimationFrame(step);
      };
      requestAnimationFrame(step);
    }

    zoomIn(node) {
      if (node < 0) return;
      const p = this.picture;
      if (node !== 0 && p.id[node] && p.left_out_below[node] > 0) this.load(String(p.id[node]));
      else this.zoomTo(node, false);
    }

    zoomOut() {
      const p = this.picture;
      if (this.zoomed !== this.top() && p.parent[this.zoomed] >= 0) return this.zoomTo(p.parent[this.zoomed], false);
      if (this.pictures.length > 1) {
        this.pictures.pop();
        this.zoomTo(this.top(), true);
      }
      return undefined;
    }

    open(node) {
      if (node >= 0 && this.picture.id[node]) location.href = this.box.dataset.node + this.picture.id[node];
    }

    select(node) {
      if (node == null || node < 0) return;
      this.selected = node;
      this.say(node);
      this.draw();
    }

    hover(node) {
      if (this.hovered === node) return;
      this.hovered = node;
      this.said.textContent = this.tell(node >= 0 ? node : this.selected);
      this.draw();
    }

    onKey(event) {
      const p = this.picture;
      if (!p || event.ctrlKey || event.metaKey || event.altKey) return;
      const siblings = this.selected === this.zoomed ? [this.selected] : p.children[p.parent[this.selected]];
      const at = siblings.indexOf(this.selected);
      const keys = {
        ArrowRight: () => this.select(siblings[Math.min(siblings.length - 1, at + 1)]),
        ArrowLeft: () => this.select(siblings[Math.max(0, at - 1)]),
        ArrowDown: () => this.select(p.children[this.selected][0]),
        ArrowUp: () => (this.selected === this.zoomed ? this.zoomOut() : this.select(p.parent[this.selected])),
        Home: () => this.select(this.zoomed),
        Enter: () => this.zoomIn(this.selected),
        Backspace: () => this.zoomOut(),
        Escape: () => this.zoomOut(),
        o: () => this.open(this.selected),
        O: () => this.open(this.selected),
      };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    }

    at(event) {
      const edges = this.canvas.getBoundingClientRect();
      const x = event.clientX - edges.left;
      const y = event.clientY - edges.top;
      const found = this.drawn.find((each) => x >= each.x && x < each.x + each.width && y >= each.y && y < each.y + ROW);
      return found ? found.node : -1;
    }

    onMove(event) { this.hover(this.at(event)); }

    onClick(event) {
      const node = this.at(event);
      if (node < 0) return;
      if (node === this.zoomed) this.zoomOut();
      else this.zoomIn(node);
    }

    showCrumbs() {
      const p = this.picture;
      const path = [];
      for (let node = this.zoomed; node >= 0; node = p.parent[node]) path.unshift(node);
      this.crumbs.replaceChildren();
      if (this.pictures.length > 1) this.crumbs.append(this.crumb("all", () => { this.pictures.length = 1; this.zoomTo(this.top(), true); }), " › ");
      path.slice(-6).forEach((node, i) => {
        if (i) this.crumbs.append(" › ");
        if (node === this.zoomed) {
          const here = document.createElement("span");
          here.textContent = this.label(node).slice(0, 40);
          here.setAttribute("aria-current", "true");
          this.crumbs.append(here);
        } else {
          this.crumbs.append(this.crumb(this.label(node).slice(0, 24), () => this.zoomTo(node, false)));
        }
      });
    }

    crumb(text, go) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "quiet";
      button.textContent = text;
      button.addEventListener("click", go);
      return button;
    }

    showTable(id) {
      if (this.shownTable === id) return;
      if (this.shownTable !== undefined || id) {
        window.htmx.ajax("GET", `/dashboard/parts/widest${id ? `?root=${id}` : ""}`, { target: "#widest", swap: "innerHTML" });
      }
      this.shownTable = id;
    }

    // ---------------------------------------------------------- drawing

    heat(node) {
      const p = this.picture;
      const value = this.colourBy === "uses"
        ? Math.log1p(p.uses[node]) / Math.log1p(Math.max(4, p.most_uses))
        : 1 - Math.log1p(p.ago[node]) / Math.log1p(Math.max(4, p.most_ago));
      const at = Math.min(0.9999, Math.max(0, value)) * 3;
      const low = Math.floor(at);
      return this.ramp[low].map((c, i) => Math.round(c + (this.ramp[low + 1][i] - c) * (at - low)));
    }

    draw() {
      const p = this.picture;
      if (!p) return;
      const scale = window.devicePixelRatio || 1;
      const width = this.box.clientWidth;
      const height = this.box.clientHeight;
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      const g = this.canvas.getContext("2d");
      g.scale(scale, scale);
      g.font = "12.5px system-ui, sans-serif";
      g.textBaseline = "middle";
      this.drawn = [];
      const pixels = width / this.view.width;
      const whole = Math.max(1, p.total[0]);
      const stack = [this.zoomed];
      while (stack.length) {
        const node = stack.pop();
        const x = (p.start[node] / whole - this.view.start) * pixels;
        const w = (p.total[node] / whole) * pixels;
        const y = (p.depth[node] - this.depth) * ROW;
        if (x > width || x + w < 0 || y > height) continue;
        if (y > -ROW) this.paint(g, node, Math.max(0, x), y, Math.min(width, x + w) - Math.max(0, x));
        let narrow = 0;
        for (const child of p.children[node]) {
          if ((p.total[child] / whole) * pixels >= MIN_WIDTH) stack.push(child);
          else narrow += p.total[child];
        }
        if (narrow || p.left_out[node]) this.rest(g, node, y + ROW, pixels, whole, narrow, width);
      }
      for (const each of this.drawn) {
        const isSelected = each.node === this.selected && document.activeElement === this.box;
        if (!isSelected && each.node !== this.hovered) continue;
        g.strokeStyle = isSelected ? this.colours.accent : this.colours.ink;
        g.lineWidth = isSelected ? 3 : 1.5;
        g.strokeRect(each.x + 1, each.y + 1, Math.max(1, each.width - 2), ROW - 3);
      }
    }

    paint(g, node, x, y, w) {
      const p = this.picture;
      const isNode = p.id[node] > 0;
      const rgb = isNode ? this.heat(node) : this.colours.rail.match(/\d+/g).slice(0, 3).map(Number);
      g.fillStyle = `rgb(${rgb.join(",")})`;
      g.beginPath();
      g.roundRect(x, y, Math.max(1, w - GAP), ROW - GAP - 1, w > 8 ? 3 : 0);
      g.fill();
      this.drawn.push({ node, x, y, width: Math.max(1, w - GAP) });
      g.save();
      g.clip();
      const isDark = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] < 140;
      if (p.pinned[node]) {
        g.strokeStyle = isDark ? "rgba(255,255,255,0.55)" : "rgba(0,0,0,0.45)";
        g.lineWidth = 1.5;
        g.beginPath();
        for (let at = x - ROW; at < x + w; at += 8) {
          g.moveTo(at, y + ROW);
          g.lineTo(at + ROW, y);
        }
        g.stroke();
      }
      if (w > 34) {
        g.fillStyle = isDark ? "#ffffff" : "#1c2023";
        const text = this.label(node);
        if (p.pinned[node]) {
          const wide = Math.min(w, g.measureText(text).width + 12);
          const ink = g.fillStyle;
          g.fillStyle = `rgb(${rgb.join(",")})`;
          g.fillRect(x, y, wide, ROW);
          g.fillStyle = ink;
        }
        g.fillText(text, x + 7, y + ROW / 2 - 0.5);
      }
      g.restore();
    }

    // What is too narrow to be drawn, together.
    rest(g, node, y, pixels, whole, narrow, width) {
      const p = this.picture;
      const kept = p.children[node].reduce((sum, child) => sum + p.total[child], 0);
      const missing = p.total[node] - p.tokens[node] - kept;
      const x = ((p.start[node] + kept - narrow) / whole - this.view.start) * pixels;
      const w = ((narrow + missing) / whole) * pixels;
      if (w < 0.5 || x > width || x + w < 0) return;
      g.fillStyle = this.colours.rail;
      const from = Math.max(0, x);
      g.fillRect(from, y + 9, Math.max(0.5, Math.min(width, x + w) - from - GAP), ROW - 19);
    }
  }

  // From columns to what is drawn: children widest first, where each begins, how deep it lies.
  function arrange(picture) {
    const size = picture.id.length;
    picture.children = Array.from({ length: size }, () => []);
    for (let node = 1; node < size; node += 1) picture.children[picture.parent[node]].push(node);
    picture.start = new Float64Array(size);
    picture.depth = new Int32Array(size);
    picture.left_out_below = Float64Array.from(picture.left_out);
    picture.most_uses = picture.uses.reduce((most, n) => Math.max(most, n), 0);
    picture.most_ago = picture.ago.reduce((most, n, i) => (picture.id[i] ? Math.max(most, n) : most), 0);
    for (let node = 0; node < size; node += 1) {
      const children = picture.children[node];
      children.sort((a, b) => picture.total[b] - picture.total[a]);
      let at = picture.start[node];
      for (const child of children) {
        picture.start[child] = at;
        picture.depth[child] = picture.depth[node] + 1;
        at += picture.total[child];
      }
    }
    picture.height = new Int32Array(size); // levels below
    for (let node = size - 1; node > 0; node -= 1) {
      const parent = picture.parent[node];
      picture.height[parent] = Math.max(picture.height[parent], picture.height[node] + 1);
      picture.left_out_below[picture.parent[node]] += picture.left_out_below[node];
    }
    return picture;
  }

  document.addEventListener("DOMContentLoaded", () => {
    const box = document.getElementById("icicle");
    if (box) window.ostinato.icicle = new Icicle(box);
  });
})();
