// The inspector: asks the server once a second how it is, and shows it. Web components without a library.
// Everything from the server is put in as text, never as markup.

const SECONDS = 120; // that the lines show
const WINDOW = 10; // seconds that a rate is taken over

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const number = (value) => (value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 2 : 0 }));

function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value > 0 && value < 0.001 ? "<0.1 %" : `${(100 * value).toFixed(1)} %`;
}

// A number now, and its line over the last two minutes. A moment at which there was nothing to measure is a gap.
class MeterTile extends HTMLElement {
  connectedCallback() {
    this.points = [];
    this.value = element("div", { class: "value" }, "–");
    this.note = element("div", { class: "note" });
    this.area = drawn("path", { class: "area" });
    this.line = drawn("path", { class: "line" });
    this.drawing = drawn("svg", { viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img" }, this.area, this.line);
    this.most = element("span");
    const axis = element("div", { class: "axis" }, element("span", {}, "2 min ago"), this.most);
    this.className = "tile";
    this.replaceChildren(element("div", { class: "label" }, this.getAttribute("label")), this.value, this.note, this.drawing, axis);
  }

  show(point, format, { note = "", top = 0, text = format(point) } = {}) {
    const now = performance.now() / 1000;
    this.points = [...this.points, { at: now, point }].filter(({ at }) => now - at <= SECONDS);
    const known = this.points.map((each) => each.point).filter(Number.isFinite);
    this.draw(now, Math.max(top, ...known, 1e-9));
    this.value.textContent = text;
    this.note.textContent = note;
    this.most.textContent = known.length ? `most ${format(Math.max(...known))}` : "";
    const said = known.length ? `The last two minutes: from ${format(Math.min(...known))} to ${format(Math.max(...known))}` : "Nothing in the last two minutes";
    this.drawing.setAttribute("aria-label", said);
  }

  draw(now, top) {
    const x = (at) => (100 - (100 * (now - at)) / SECONDS).toFixed(2);
    const y = (value) => (19 - (18 * value) / top).toFixed(2);
    let line = "", area = "", start = null, end = null;
    const close = () => {
      if (start !== null) area += `L${end} 20L${start} 20Z`;
      start = null;
    };
    for (const { at, point } of this.points) {
      if (!Number.isFinite(point)) { close(); continue; }
      const step = `${start === null ? "M" : "L"}${x(at)} ${y(point)}`;
      line += step;
      area += step;
      start ??= x(at);
      end = x(at);
    }
    close();
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}

// A table that stays where it is while its rows change, so that neither focus nor scroll position is lost.
class CellTable {
  constructor(heads, label, empty) {
    this.heads = heads;
    this.body = element("tbody");
    const head = element("tr", {}, ...heads.map(([title, kind]) => element("th", { class: kind ?? "", scope: "col" }, title)));
    const all = element("table", {}, element("thead", {}, head), this.body);
    this.scroll = element("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": label, hidden: true }, all);
    this.empty = element("p", { class: "hint" }, empty);
    this.node = element("div", {}, this.empty, this.scroll);
  }

  show(rows) {
    this.empty.hidden = rows.length > 0;
    this.scroll.hidden = rows.length === 0;
    this.body.replaceChildren(...rows.map((cells) => element("tr", {}, ...cells.map((cell, at) => element("td", { class: this.heads[at][1] ?? "" }, cell)))));
  }
}

class CallTable extends HTMLElement {
  connectedCallback() {
    const heads = [["Call"], ["State", "text"], ["Seconds"], ["Prompt"], ["Reused"], ["Computed"], ["Generated"], ["Forced"], ["Program", "text"]];
    this.table = new CellTable(heads, this.getAttribute("label"), this.getAttribute("empty"));
    this.replaceChildren(this.table.node);
  }

  show(calls) {
    this.table.show(calls.map((call) => {
      const computed = call.computed_tokens ?? (call.cached_tokens === null ? null : call.prompt_tokens - call.cached_tokens);
      const state = call.outcome ?? (call.running ? "running" : "waiting");
      const numbers = [call.prompt_tokens, call.cached_tokens, computed, call.generated_tokens, call.forced_tokens].map(number);
      return [`${call.endpoint} ${call.id.slice(-6)}`, state, call.seconds.toFixed(1), ...numbers, call.program ?? ""];
    }));
  }
}

class PrefixTree extends HTMLElement {
  show(paths, pool, kept) {
    const now = JSON.stringify([paths, kept]);
    if (now === this.shown) return;
    this.shown = now;
    this.pool = pool;
    this.kept = kept;
    if (!paths.length) {
      this.replaceChildren(element("p", { class: "hint" }, "The tree is empty, or this backend does not show it."));
      return;
    }
    const below = new Map();
    for (const [place, path] of paths.entries()) below.set(path.parent, [...(below.get(path.parent) ?? []), { ...path, place }]);
    this.replaceChildren(this.branches(null, below));
  }

  branches(parent, below) {
    const siblings = below.get(parent).sort((a, b) => b.hits - a.hits || b.tokens - a.tokens);
    return element("ul", {}, ...siblings.map((path) => {
      const under = below.has(path.place) ? [this.branches(path.place, below)] : [];
      return element("li", {}, this.branch(path), ...under);
    }));
  }

  branch(path) {
    const held = element("i"), used = element("b");
    held.style.width = `${(100 * path.tokens) / Math.max(this.kept, path.tokens)}%`;
    used.style.width = `${(100 * path.locked_tokens) / Math.max(this.kept, path.tokens)}%`;
    const text = element("div", { class: "path", title: path.text }, path.text.replaceAll("\n", "⏎").trimEnd() || "(blank)");
    const parts = [`from token ${number(path.start)}`, `${number(path.hits)} tokens served`, `holds ${number(path.tokens)}${this.pool ? `, ${percent(path.tokens / this.pool)} of the pool` : ""}`];
    if (path.locked_tokens) parts.push(`${number(path.locked_tokens)} in use`);
    return element("div", { class: "branch" }, text, element("div", { class: "bar" }, held, used), element("div", { class: "numbers" }, parts.join("; ")));
  }
}

class ProgramBook extends HTMLElement {
  connectedCallback() {
    this.books = new Map();
    this.hint = element("p", { class: "hint" }, "No program has called yet.");
    this.replaceChildren(this.hint);
  }

  show(names) {
    this.hint.hidden = names.length > 0;
    for (const [name, book] of this.books) {
      if (names.includes(name)) continue;
      book.remove();
      this.books.delete(name);
    }
    for (const name of names.toReversed()) if (!this.books.has(name)) this.prepend(this.book(name));
    for (const [name, book] of this.books) if (book.open) this.report(name, book);
  }

  book(name) {
    const page = element("a", { href: `programs/${encodeURIComponent(name)}/report`, target: "_blank", rel: "noopener" }, "The whole report");
    const book = element("details", {}, element("summary", {}, name));
    book.sums = element("p", { class: "hint" });
    const heads = [["Call"], ["Prompt"], ["Reused"], ["Computed"], ["Why", "text"], ["Generated"], ["Forced"], ["Passes saved"], ["Queued s"], ["Run s"]];
    book.table = new CellTable(heads, `Calls of ${name}`, "None of its calls is kept.");
    book.append(book.sums, book.table.node, page);
    book.addEventListener("toggle", () => book.open && this.report(name, book));
    this.books.set(name, book);
    return book;
  }

  async report(name, book) {
    if (book.asking) return;
    book.asking = true;
    try {
      const answer = await fetch(`programs/${encodeURIComponent(name)}/report`, { headers: { accept: "application/json" } });
      if (answer.ok) this.tell(await answer.json(), book);
    } finally {
      book.asking = false;
    }
  }

  tell({ totals, calls }, book) {
    const latest = calls.at(-1)?.number;
    if (book.told === latest) return;
    book.told = latest;
    const sums = [`${number(totals.calls)} calls`, `${number(totals.prompt_tokens)} prompt tokens, ${percent(totals.reuse)} reused`, `${number(totals.completion_tokens)} generated, ${number(totals.forced_tokens)} forced`, `${number(totals.passes_saved)} forward passes saved`];
    book.sums.textContent = sums.join("; ");
    book.table.show(calls.map((call) => {
      const before = [call.prompt_tokens, call.cached_tokens, call.prompt_tokens - call.cached_tokens].map(number);
      const after = [call.completion_tokens, call.forced_tokens, call.passes_saved].map(number);
      return [`${call.number + 1} ${call.name}`, ...before, call.recomputed.map(why).join("; ") || "nothing was computed", ...after, call.queue_seconds.toFixed(2), call.run_seconds.toFixed(2)];
    }));
  }
}

function why({ why: reason, tokens, first }) {
  if (reason === "last") return "the last token, which every call computes";
  if (reason === "evicted") return `${number(tokens)} evicted`;
  return `${number(tokens)} never seen${first ? `, from ${JSON.stringify(first)} on` : ""}`;
}

const TOOLS = [{ type: "function", function: { name: "get_weather", description: "Weather of a city.", parameters: { type: "object", properties: { city: { type: "string" }, days: { type: "integer", minimum: 1, maximum: 7 } }, required: ["city"] } } }];
const SCHEMA = { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] };
const KINDS = { text: ["Free text", ""], schema: ["JSON schema", SCHEMA], tools: ["Tools", TOOLS], required: ["Tools, one is required", TOOLS], regex: ["Regular expression", "(yes|no), because [a-z ]{3,40}\\."] };

class PlayGround extends HTMLElement {
  connectedCallback() {
    this.message = element("textarea", { name: "message", value: "Anna is 31 years old. Who is she?" });
    this.kind = element("select", { name: "kind" }, ...Object.entries(KINDS).map(([value, [title]]) => element("option", { value }, title)));
    this.form = element("textarea", { name: "form", spellcheck: false });
    this.length = element("input", { type: "number", name: "length", value: 128, min: 1, max: 4096 });
    this.heat = element("input", { type: "number", name: "heat", value: 0, min: 0, max: 2, step: 0.1 });
    this.send = element("button", { class: "main", type: "submit" }, "Send");
    this.stop = element("button", { type: "button", disabled: true }, "Stop");
    this.answer = element("pre", { role: "log", "aria-live": "polite", "aria-label": "Answer", tabIndex: 0 });
    const label = (title, field) => element("label", {}, title, field);
    const form = element("form", {}, label("Message (Ctrl+Enter sends)", this.message), label("Schema, tools or expression", this.form), label("The answer must be", this.kind), label("Most tokens", this.length), label("Temperature", this.heat), element("div", { class: "actions" }, this.send, this.stop));
    this.kind.addEventListener("change", () => this.fill());
    form.addEventListener("keydown", (event) => { if (event.key === "Enter" && event.ctrlKey && !this.send.disabled) form.requestSubmit(); });
    form.addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    this.stop.addEventListener("click", () => this.going?.abort());
    this.replaceChildren(form, this.answer);
    this.fill();
  }

  fill() {
    const example = KINDS[this.kind.value][1];
    this.form.value = typeof example === "string" ? example : JSON.stringify(example, null, 1);
    this.form.disabled = this.kind.value === "text";
  }

  body() {
    const body = { messages: [{ role: "user", content: this.message.value }], max_tokens: Number(this.length.value), temperature: Number(this.heat.value), stream: true, stream_options: { include_usage: true } };
    const kind = this.kind.value;
    if (kind === "regex") body.regex = this.form.value;
    if (kind === "schema") body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: this.parsed() } };
    if (kind === "tools" || kind === "required") Object.assign(body, { tools: this.parsed(), tool_choice: kind === "tools" ? "auto" : "required" });
    return body;
  }

  parsed() {
    try {
      return JSON.parse(this.form.value);
    } catch (error) {
      throw new Error(`The schema or tools are not JSON: ${error.message}`);
    }
  }

  async ask() {
    this.answer.className = "";
    this.answer.textContent = "";
    this.answer.setAttribute("aria-busy", "true");
    this.going = new AbortController();
    this.send.disabled = true;
    this.stop.disabled = false;
    try {
      const headers = { "content-type": "application/json", "x-agentrt-program": "playground" };
      const answer = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(this.body()), signal: this.going.signal });
      if (!answer.ok) throw new Error((await answer.json()).error.message);
      await this.read(answer.body.pipeThrough(new TextDecoderStream()).getReader());
    } catch (error) {
      if (error.name !== "AbortError") { this.answer.className = "error"; this.say(`\n${error.message}`); }
    } finally {
      this.send.disabled = false;
      this.stop.disabled = true;
      this.answer.setAttribute("aria-busy", "false");
    }
  }

  say(text) { this.answer.append(text); }

  async read(reader) {
    let held = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (held + value).split("\n\n");
      held = events.pop();
      for (const event of events) if (event.startsWith("data: {")) this.hear(JSON.parse(event.slice(6)));
    }
  }

  hear(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) {
      const usage = chunk.usage;
      this.say(`\n\n— ${usage.prompt_tokens} prompt tokens, ${usage.prompt_tokens_details.cached_tokens} reused; ${usage.completion_tokens} generated, ${usage.completion_tokens_details.forced_tokens} forced`);
    }
    for (const { delta } of chunk.choices) {
      this.say(delta.reasoning_content ?? "");
      this.say(delta.content ?? "");
      for (const call of delta.tool_calls ?? []) this.say((call.function.name ? `\n→ ${call.function.name} ` : "") + (call.function.arguments ?? ""));
    }
  }
}

for (const [name, kind] of Object.entries({ "meter-tile": MeterTile, "call-table": CallTable, "prefix-tree": PrefixTree, "program-book": ProgramBook, "play-ground": PlayGround })) customElements.define(name, kind);

const byId = (id) => document.getElementById(id);
const tile = (name) => document.querySelector(`meter-tile[name="${name}"]`);
const moments = [];

// What was counted in the last seconds. The engine counts a request's tokens at its end; those of running ones are added here.
function counted(state) {
  const { stats } = state;
  const now = { at: performance.now() / 1000, generated: stats.completion_tokens ?? 0, forced: stats.forced_tokens ?? 0, asked: stats.prefix_cache_queries ?? 0, hit: stats.prefix_cache_hits ?? 0 };
  for (const call of state.calls) { now.generated += call.generated_tokens; now.forced += call.forced_tokens; }
  moments.push(now);
  while (moments.length > 1 && now.at - moments[1].at >= WINDOW) moments.shift();
  const since = moments[0];
  const grown = (name) => Math.max(0, now[name] - since[name]);
  const rate = (part, whole) => (whole > 0 ? Math.min(part / whole, 1) : null);
  return {
    tokens: now.at > since.at ? grown("generated") / (now.at - since.at) : 0,
    forced: rate(grown("forced"), grown("generated")),
    hits: rate(grown("hit"), grown("asked")),
    always: { forced: rate(now.forced, now.generated), hits: rate(now.hit, now.asked), tokens: now.generated },
  };
}

function show(state) {
  byId("model").textContent = state.model;
  const status = byId("status");
  status.className = state.complaint ? "bad" : "";
  const up = `version ${state.version}, up ${number(Math.floor(state.uptime_seconds / 60))} min, context ${number(state.max_context)}, pool ${number(state.kv_tokens)} tokens`;
  const said = state.complaint ?? (state.accepting ? up : "shutting down");
  if (status.textContent !== said) status.textContent = said;
  const load = state.load ?? { running: 0, waiting: 0, kv_usage: null };
  const rate = counted(state);
  const kept = state.kv_tokens ? (state.stats.cached_tokens_now ?? 0) / state.kv_tokens : null;
  tile("requests").show(load.running + load.waiting, number, { text: `${load.running} + ${load.waiting}`, note: `${state.calls.length} ${state.calls.length === 1 ? "call" : "calls"} open` });
  tile("hits").show(rate.hits, percent, { top: 1, note: `${percent(rate.always.hits)} since the start` });
  tile("tokens").show(rate.tokens, number, { note: `${number(rate.always.tokens)} since the start` });
  tile("forced").show(rate.forced, percent, { top: 1, note: `${percent(rate.always.forced)} since the start` });
  tile("pool").show(load.kv_usage, percent, { top: 1, note: `${percent(kept)} kept in the tree` });
  byId("calls").show(state.calls);
  byId("recent").show(state.recent);
  byId("tree").show(state.paths, state.kv_tokens, state.stats.cached_tokens_now ?? 0);
  byId("programs").show(state.programs);
}

async function watch() {
  try {
    const answer = await fetch("inspector/state");
    if (!answer.ok) throw new Error(`the server said ${answer.status}`);
    show(await answer.json());
  } catch (error) {
    byId("status").className = "bad";
    byId("status").textContent = `not connected: ${error.message}`;
  }
  setTimeout(watch, document.hidden ? 5000 : 1000);
}

watch();
