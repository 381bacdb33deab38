// Figures and charts of speculation. `Live.take` gets the steps as they come.

const WINDOW_MS = 500; // tokens a second are an average over this time
const SETTLED_MS = 50; // rates over a shorter time mean nothing
const $ = (id) => document.getElementById(id);
const percent = (share) => `${Math.round(share * 100)} %`;

export class Live {
  #all = new Steps();
  #reply = new Steps();
  #begin = 0;
  #arrivals = []; // [ms, tokens] of this reply
  #points = []; // [s, tokens a second] of this reply
  #rate = 0;
  #drawing = false;

  /** Reset the figures of the reply when a request is sent. */
  start() {
    this.#reply = new Steps();
    this.#begin = performance.now();
    this.#arrivals = [];
    this.#points = [];
    this.#rate = 0;
    $("first").textContent = "–";
    this.#draw();
  }

  /** Add new steps. */
  take(steps) {
    const now = performance.now();
    let count = 0;
    for (const step of steps) {
      this.#reply.add(step);
      this.#all.add(step);
      count += step.tokens.length;
    }
    if (!count) return;
    if (!this.#arrivals.length) $("first").textContent = `${Math.round(now - this.#begin)} ms`;
    this.#arrivals.push([now, count]);
    const first = this.#arrivals[0][0];
    if (now - first >= SETTLED_MS) {
      // The first arrival does not count, because its time has the prompt's.
      const since = Math.max(first, now - WINDOW_MS);
      const recent = this.#arrivals.slice(1).filter(([at]) => at > since);
      const tokens = recent.reduce((sum, [, n]) => sum + n, 0);
      this.#points.push([(now - first) / 1000, (tokens * 1000) / (now - since)]);
      const later = this.#arrivals.slice(1).reduce((sum, [, n]) => sum + n, 0);
      this.#rate = (later * 1000) / (now - first);
    }
    this.#soon();
  }

  /** Reset all figures for a new conversation. */
  clear() {
    this.#all = new Steps();
    this.start();
  }

  /** Return a sentence about this reply. */
  sentence() {
    const { tokens, steps, drafted } = this.#reply;
    if (!tokens) return "";
    const ofSteps = drafted ? ` in ${steps} steps` : "";
    const rate = this.#rate ? `, ${Math.round(this.#rate)} tokens a second` : "";
    return `${tokens} tokens${ofSteps}${rate}`;
  }

  #soon() {
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => {
      this.#drawing = false;
      this.#draw();
    });
  }

  #draw() {
    const { steps, drafted, accepted } = this.#reply;
    const perStep = drafted ? (accepted / steps + 1).toFixed(2) : steps ? "1" : "–";
    const rate = this.#rate ? Math.round(this.#rate).toLocaleString("en") : "–";
    $("rate").textContent = rate;
    $("per-step").textContent = perStep;
    $("accepted").textContent = drafted ? percent(accepted / drafted) : "–";
    const brief = [`${perStep} tokens a step`, ...(this.#rate ? [`${rate}/s`] : [])];
    $("brief").textContent = steps ? brief.join(" · ") : "";
    drawPositions($("positions"), this.#all);
    drawSpeed($("speed"), this.#points);
  }
}

/** Counts of verify steps. The prompt's own token belongs to none. */
class Steps {
  tokens = 0;
  steps = 0;
  drafted = 0;
  accepted = 0;
  atLeast = []; // number of steps that accepted the draft at each position

  add({ drafted, accepted, tokens }) {
    const isFirst = this.tokens === 0;
    this.tokens += tokens.length;
    if (isFirst) return;
    this.steps += 1;
    this.drafted += drafted;
    this.accepted += accepted;
    for (let position = 0; position < drafted; position++) {
      this.atLeast[position] = (this.atLeast[position] ?? 0) + (position < accepted ? 1 : 0);
    }
  }
}

// --- charts -----------------------------------------------------------------------------------------

const LEFT = 42, RIGHT = 316, TOP = 8, BOTTOM = 108;

function make(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Return the lines of a scale from 0 to the maximum. */
function scale(max, label) {
  return [0, max / 2, max].flatMap((value) => {
    const y = BOTTOM - (value / max) * (BOTTOM - TOP);
    return [
      make("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: y, y2: y }),
      make("text", { x: LEFT - 5, y: y + 3.5, "text-anchor": "end" }, label(value)),
    ];
  });
}

/** Replace a chart by a text. */
function showText(svg, text) {
  svg.setAttribute("aria-label", text);
  svg.replaceChildren(make("text", { x: 160, y: 65, "text-anchor": "middle" }, text));
}

function drawPositions(svg, { atLeast, steps, tokens }) {
  if (!atLeast.length) {
    showText(svg, tokens ? "No drafter: one token a step" : "No reply yet");
    return;
  }
  const shares = atLeast.map((count) => count / steps);
  const width = (RIGHT - LEFT) / shares.length;
  const bars = shares.flatMap((share, position) => {
    const height = share * (BOTTOM - TOP);
    const bar = make("rect", {
      class: "bar",
      x: LEFT + position * width + width * 0.12,
      y: BOTTOM - height,
      width: width * 0.76,
      height,
      rx: 2,
    });
    bar.style.setProperty("--depth", depth(position, shares.length));
    const middle = LEFT + (position + 0.5) * width;
    return [bar, make("text", { x: middle, y: 122, "text-anchor": "middle" }, position + 1)];
  });
  svg.replaceChildren(...scale(1, percent), ...bars);
  const labels = shares.map((share, position) => `position ${position + 1}: ${percent(share)}`);
  svg.setAttribute("aria-label", `Drafts accepted. ${labels.join(", ")}`);
}

function drawSpeed(svg, points) {
  if (points.length < 2) {
    showText(svg, "No reply long enough yet");
    return;
  }
  const max = round(Math.max(...points.map(([, rate]) => rate)));
  const [last] = points.at(-1);
  const [begin] = points[0];
  const x = (s) => (LEFT + (s / last) * (RIGHT - LEFT)).toFixed(1);
  const y = (rate) => (BOTTOM - (rate / max) * (BOTTOM - TOP)).toFixed(1);
  const line = points.map(([s, rate]) => `${x(s)} ${y(rate)}`).join("L");
  svg.replaceChildren(
    ...scale(max, (value) => Math.round(value)),
    make("path", { class: "area", d: `M${x(begin)} ${BOTTOM}L${line}L${x(last)} ${BOTTOM}Z` }),
    make("path", { class: "line", d: `M${line}` }),
    make("text", { x: LEFT, y: 122 }, "0 s"),
    make("text", { x: RIGHT, y: 122, "text-anchor": "end" }, `${last.toFixed(1)} s`),
  );
  const now = Math.round(points.at(-1)[1]);
  svg.setAttribute("aria-label", `Tokens a second: ${now} at ${last.toFixed(1)} s, most ${max}`);
}

/** Return the next number of one digit and zeros, or of 15 and zeros. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  const digit = [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((d) => d * power >= value);
  return digit * power;
}

/** Return a position's fraction of the way from the first, 0, to the last, 1. */
export function depth(position, count) {
  return count > 1 ? (position / (count - 1)).toFixed(3) : 0;
}
