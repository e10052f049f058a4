// The inspector: asks the server once a second how it is, and shows it. Web components without a library.
// Everything from the server is put in as text, never as markup.

const SECONDS = 120;

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

const number = (value) => (value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumFractionDigits: 2 }));
const percent = (value) => (value === null || Number.isNaN(value) ? "–" : `${(100 * value).toFixed(1)} %`);

class MeterTile extends HTMLElement {
  connectedCallback() {
    this.points = [];
    this.value = element("div", { class: "value" }, "–");
    const space = "http://www.w3.org/2000/svg";
    const drawing = document.createElementNS(space, "svg");
    drawing.setAttribute("viewBox", "0 0 100 20");
    drawing.setAttribute("preserveAspectRatio", "none");
    drawing.setAttribute("aria-hidden", "true");
    this.line = document.createElementNS(space, "path");
    drawing.append(this.line);
    this.className = "tile";
    this.replaceChildren(element("div", { class: "label" }, this.getAttribute("label")), this.value, drawing);
  }

  show(text, point) {
    this.value.textContent = text;
    this.points = [...this.points, Number.isFinite(point) ? point : 0].slice(-SECONDS);
    const top = Math.max(...this.points, 1e-9);
    const place = (value, at) => `${((100 * at) / Math.max(this.points.length - 1, 1)).toFixed(2)} ${(19 - (18 * value) / top).toFixed(2)}`;
    this.line.setAttribute("d", `M${this.points.map(place).join("L")}`);
  }
}

function table(heads, rows, empty) {
  if (!rows.length) return element("p", { class: "hint" }, empty);
  const head = element("tr", {}, ...heads.map(([title, kind]) => element("th", { class: kind ?? "", scope: "col" }, title)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell, at) => element("td", { class: heads[at][1] ?? "" }, cell))));
  return element("div", { class: "scroll", tabIndex: 0 }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

class CallTable extends HTMLElement {
  show(calls) {
    const heads = [["Call"], ["State", "text"], ["Seconds"], ["Prompt"], ["Reused"], ["Computed"], ["Generated"], ["Forced"], ["Program", "text"]];
    const rows = calls.map((call) => {
      const computed = call.cached_tokens === null ? null : call.prompt_tokens - call.cached_tokens;
      const state = call.outcome ?? (call.running ? "running" : "waiting");
      const numbers = [call.prompt_tokens, call.cached_tokens, computed, call.generated_tokens, call.forced_tokens].map(number);
      return [`${call.endpoint} ${call.id.slice(-6)}`, state, number(call.seconds), ...numbers, call.program ?? ""];
    });
    this.replaceChildren(table(heads, rows, this.getAttribute("empty")));
  }
}

class PrefixTree extends HTMLElement {
  show(paths, pool) {
    if (!paths.length) return this.replaceChildren(element("p", { class: "hint" }, "The tree is empty, or this backend does not show it."));
    const most = Math.max(...paths.map((path) => path.tokens));
    this.replaceChildren(...paths.sort((a, b) => a.start - b.start || b.tokens - a.tokens).map((path) => this.row(path, most, pool)));
  }

  row(path, most, pool) {
    const used = element("b");
    used.style.width = `${(100 * path.locked_tokens) / Math.max(path.tokens, 1)}%`;
    const bar = element("div", { class: "bar" }, used);
    bar.style.width = `${(100 * path.tokens) / most}%`;
    const share = pool ? `, ${percent(path.tokens / pool)} of the pool` : "";
    const text = element("div", { class: "path", title: path.text }, path.text.replaceAll("\n", "⏎"));
    const numbers = element("div", { class: "numbers" }, `from ${path.start}, ${number(path.tokens)} tokens${share}; ${number(path.hits)} served`);
    return element("div", { class: "path-row" }, element("div", {}, text, bar), numbers);
  }
}

class ProgramBook extends HTMLElement {
  show(names) {
    if (JSON.stringify(names) === this.shown) return;
    this.shown = JSON.stringify(names);
    if (!names.length) return this.replaceChildren(element("p", { class: "hint" }, "No program has called yet."));
    this.replaceChildren(...names.map((name) => this.book(name)));
  }

  book(name) {
    const place = element("div");
    const book = element("details", {}, element("summary", {}, name), place);
    book.addEventListener("toggle", () => book.open && this.report(name, place));
    return book;
  }

  async report(name, place) {
    const answer = await fetch(`programs/${encodeURIComponent(name)}/report`);
    const report = await answer.json();
    const heads = [["Call"], ["Prompt"], ["Reused"], ["Computed"], ["Why", "text"], ["Generated"], ["Forced"], ["Passes saved"], ["Queued s"]];
    const rows = report.calls.map((call, at) => {
      const before = [call.prompt_tokens, call.cached_tokens, call.computed_tokens].map(number);
      const after = [call.completion_tokens, call.forced_tokens, call.passes_saved, call.queue_seconds].map(number);
      return [`${at + 1} ${call.endpoint}`, ...before, call.why, ...after];
    });
    place.replaceChildren(table(heads, rows, "None of its calls is kept."));
  }
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
    const form = element("form", {}, label("Message", this.message), label("Schema, tools or expression", this.form), label("The answer must be", this.kind), label("Most tokens", this.length), label("Temperature", this.heat), element("div", { class: "actions" }, this.send, this.stop));
    this.kind.addEventListener("change", () => this.fill());
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
    if (kind === "schema") body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(this.form.value) } };
    if (kind === "tools" || kind === "required") Object.assign(body, { tools: JSON.parse(this.form.value), tool_choice: kind === "tools" ? "auto" : "required" });
    return body;
  }

  async ask() {
    this.answer.className = "";
    this.answer.textContent = "";
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
let before = null;

function rates(state) {
  const stats = state.stats;
  const at = performance.now() / 1000;
  const now = { at, generated: stats.completion_tokens ?? stats.generated_tokens ?? 0, forced: stats.forced_tokens ?? 0 };
  for (const call of state.calls) { now.generated += call.generated_tokens; now.forced += call.forced_tokens; }
  const tokens = before ? Math.max(0, now.generated - before.generated) / (at - before.at) : 0;
  before = now;
  return { tokens, forced: now.generated ? now.forced / now.generated : null, hits: stats.prompt_tokens ? stats.cached_tokens / stats.prompt_tokens : null };
}

function show(state) {
  byId("model").textContent = state.model;
  const status = byId("status");
  status.className = state.complaint ? "bad" : "";
  const up = `version ${state.version}, up ${number(Math.floor(state.uptime_seconds / 60))} min, context ${number(state.max_context)}, pool ${number(state.kv_tokens)} tokens`;
  const said = state.complaint ?? (state.accepting ? up : "shutting down");
  if (status.textContent !== said) status.textContent = said;
  const load = state.load ?? { running: 0, waiting: 0, kv_usage: null };
  const rate = rates(state);
  tile("requests").show(`${load.running}, ${load.waiting}`, load.running);
  tile("hits").show(percent(rate.hits), rate.hits);
  tile("tokens").show(number(rate.tokens), rate.tokens);
  tile("forced").show(percent(rate.forced), rate.forced);
  tile("pool").show(percent(load.kv_usage), load.kv_usage);
  byId("calls").show(state.calls);
  byId("recent").show(state.recent);
  byId("tree").show(state.paths, state.kv_tokens);
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
