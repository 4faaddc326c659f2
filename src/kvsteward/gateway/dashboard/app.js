// The live account: polls the public API once a second while the tab is visible, and draws it.
// Invariant: text that came from a session reaches the document as a text node only, never as markup.
"use strict";

const POLL_MS = 1000;
const TIMEOUT_MS = 8000;
const WINDOW_S = 900;
const SHORTEST_S = 120;
const HITS_WINDOW_S = 60;
const SHOWN_IN_CHART = 10;
const SHOWN_SESSIONS = 200;
const SHOWN_MESSAGES = 200;
const SHOWN_CHARS = 4000;
const KEY = "kvsteward.key";
const $ = (id) => document.getElementById(id);

const state = {
  memory: null, health: null, models: [], samples: [], colors: new Map(), rows: new Map(),
  selected: null, // {id, fresh, log, view, seen}
  tab: "log", chat: null, // {id, abort, reply}
  needKey: false, problem: "", answeredAt: 0, timer: 0, polling: false, askingHealth: false,
};

// -- asking -------------------------------------------------------------------------------------------------------

class ApiError extends Error {
  constructor(status, fields) {
    super(fields.message || `the gateway answered with status ${status}`);
    this.status = status;
    this.hint = fields.hint || "";
    this.code = fields.code || "";
  }
}

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...more };
}

async function refused(response) {
  let fields = {};
  try {
    fields = (await response.json()).error || {};
  } catch {
    // Not JSON: a proxy's page. The status says enough.
  }
  const error = new ApiError(response.status, fields);
  if (response.status === 401) askForKey(error);
  return error;
}

async function ask(path) {
  const response = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!response.ok) throw await refused(response);
  return response.json();
}

const sessionPath = (id, rest = "") => `/v1/sessions/${encodeURIComponent(id)}${rest}`;

// -- polling ------------------------------------------------------------------------------------------------------

async function poll() {
  clearTimeout(state.timer);
  if (document.hidden || state.polling || state.needKey) return;
  state.polling = true;
  askHealth();
  try {
    const after = state.samples.length ? state.samples.at(-1).at_s : 0;
    const [memory, history] = await Promise.all([
      ask(`/v1/internal/memory?limit=${SHOWN_SESSIONS}`),
      ask(`/v1/internal/history?after=${after}`),
    ]);
    if (!state.models.length) state.models = (await ask("/v1/models")).data.map((card) => card.id);
    keep(history.samples, memory.now_s);
    state.memory = memory;
    state.problem = "";
    state.answeredAt = Date.now();
    draw();
  } catch (error) {
    state.problem = error instanceof ApiError ? error.message : "The gateway does not answer.";
  } finally {
    state.polling = false;
    drawStatus();
    if (!state.needKey) state.timer = setTimeout(poll, POLL_MS);
  }
}

async function askHealth() {
  if (state.askingHealth) return;
  state.askingHealth = true;
  try {
    const response = await fetch("/health", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    state.health = await response.json();
    drawStatus();
  } catch {
    state.health = null; // `poll` tells when nothing answers
  } finally {
    state.askingHealth = false;
  }
}

function keep(samples, now) {
  state.samples.push(...samples);
  const first = state.samples.findIndex((sample) => sample.at_s >= now - WINDOW_S);
  if (first !== 0) state.samples.splice(0, first < 0 ? state.samples.length : first);
}

// -- words and numbers --------------------------------------------------------------------------------------------

const count = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en"));

function bytes(n) {
  if (n === null || n === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${n >= 100 || unit === 0 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

function span(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

const percent = (ratio) => (ratio === null || ratio === undefined ? "–" : `${(ratio * 100).toFixed(1)} %`);
const cut = (text, chars) => (text.length > chars ? `${text.slice(0, chars)}…` : text);

function put(id, text) {
  const node = typeof id === "string" ? $(id) : id;
  if (node.textContent !== text) node.textContent = text;
}

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children); // strings become text nodes
  return node;
}

// -- status and figures -------------------------------------------------------------------------------------------

function drawStatus() {
  const since = state.answeredAt ? ` Figures are from ${new Date(state.answeredAt).toLocaleTimeString()}.` : "";
  let level = "ok";
  let text = "";
  if (state.needKey) [level, text] = ["bad", "An API key is needed."];
  else if (state.problem) [level, text] = ["bad", `${state.problem}${since} Trying again each second.`];
  else if (!state.memory) [level, text] = ["wait", "Loading the account…"];
  else if (state.health && state.health.engine.problem !== null) {
    [level, text] = ["bad", `Engine unavailable: ${state.health.engine.problem}. An embedded engine restarts by itself.`];
  } else if (state.memory.waiting > 0) {
    [level, text] = ["warn", `${count(state.memory.waiting)} turns wait for room in the KV pool.`];
  } else text = "Engine answers.";
  $("status").dataset.level = level;
  put("status", text);
  document.body.dataset.state = level === "wait" ? "loading" : state.problem || state.needKey ? "stale" : "live";
  $("key-button").hidden = !(state.needKey || sessionStorage.getItem(KEY));
  $("send").disabled = state.chat !== null;
  $("abort").disabled = state.chat === null;
  if (state.health) {
    const engine = state.health.engine;
    put("engine", [engine.dialect, engine.version, state.models.join(", ")].filter(Boolean).join(" · "));
  }
}

/** Prefix counters of a sample: [asked, found]. The engine's own where it has them. */
function counters(sample) {
  const { prefix_queried_tokens_total: asked, prefix_hit_tokens_total: found } = sample.engine;
  if (typeof asked === "number" && typeof found === "number") return [asked, found];
  return [sample.prompt_tokens_total, sample.cached_tokens_total];
}

/** For each sample the share of prompt tokens that were found in the last minute; null where none were asked. */
function hitShares() {
  let start = 0;
  return state.samples.map((sample) => {
    while (state.samples[start].at_s < sample.at_s - HITS_WINDOW_S) start += 1;
    const [asked, found] = counters(sample);
    const [before, had] = counters(state.samples[start]);
    return asked > before && found >= had ? (found - had) / (asked - before) : null;
  });
}

function drawFigures() {
  const m = state.memory;
  const perToken = m.kv_bytes_per_token;
  const inBytes = (tokens) => (perToken && tokens !== null ? bytes(tokens * perToken) : "bytes not reported");
  const last = state.samples.at(-1);
  put("f-weights", bytes(m.weight_bytes));
  put("f-weights-sub", m.weight_bytes === null ? "not reported" : "in memory, fixed");
  put("f-kv", count(m.resident_tokens));
  const share = m.kv_capacity_tokens ? ` · ${percent(m.resident_tokens / m.kv_capacity_tokens)}` : "";
  put("f-kv-sub", `${inBytes(m.resident_tokens)}${share}`);
  put("f-pool", count(m.kv_capacity_tokens));
  const kinds = m.k_dtype ? ` · ${m.k_dtype === m.v_dtype ? m.k_dtype : `${m.k_dtype}/${m.v_dtype}`}` : "";
  put("f-pool-sub", `${inBytes(m.kv_capacity_tokens)}${kinds}`);
  put("f-queue", `${count(m.running)} / ${count(m.waiting)}`);
  const lost = m.engine.preemptions_total;
  put("f-queue-sub", lost === null ? "turns" : `turns · ${count(lost)} preemptions`);
  put("f-ttft", last && last.ttft_ms !== null ? `${count(last.ttft_ms)} ms` : "–");
  put("f-ttft-sub", last && last.ttft_ms !== null ? "median of recent turns" : "no streamed turn yet");
  if (!last) return;
  const [asked, found] = counters(last);
  put("f-hits", asked ? percent(found / asked) : "–");
  put("f-hits-sub", asked ? `${count(found)} of ${count(asked)} tokens` : "no prompt yet");
}

// -- charts -------------------------------------------------------------------------------------------------------

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/** plotly reads a subset of HTML in names: these three characters must not begin any. */
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

/** The sessions with the most tokens in the window, largest last so that its area is at the bottom of the legend. */
function largest() {
  const peaks = new Map();
  for (const sample of state.samples) {
    for (const [id, tokens] of Object.entries(sample.sessions)) {
      if (tokens > (peaks.get(id) || 0)) peaks.set(id, tokens);
    }
  }
  const ids = [...peaks.keys()].sort((a, b) => peaks.get(b) - peaks.get(a)).slice(0, SHOWN_IN_CHART);
  for (const id of [...state.colors.keys()]) if (!ids.includes(id)) state.colors.delete(id);
  for (const id of ids) {
    if (state.colors.has(id)) continue;
    const used = new Set(state.colors.values());
    state.colors.set(id, [...Array(SHOWN_IN_CHART).keys()].find((n) => !used.has(n)));
  }
  return ids.sort((a, b) => state.colors.get(a) - state.colors.get(b));
}

const color = (id) => (state.colors.has(id) ? css(`--series-${state.colors.get(id)}`) : css("--series-other"));

function title(id) {
  const session = state.memory && state.memory.sessions.find((s) => s.id === id);
  return cut((session && session.title) || id, 40);
}

/** The time that the charts show: from the first sample, so that a young gateway's charts are not empty. */
function shownTime() {
  const now = state.memory.now_s;
  const first = state.samples.length ? state.samples[0].at_s : now;
  return [Math.min(first, now - SHORTEST_S), now].map((s) => new Date(s * 1000));
}

function layout(more) {
  const axis = { gridcolor: css("--grid"), linecolor: css("--grid"), zeroline: false, fixedrange: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--quiet"), size: 11, family: "system-ui, sans-serif" },
    margin: { l: 52, r: 12, t: 6, b: 24 }, showlegend: false, hovermode: "x unified", dragmode: false,
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--text"), size: 12 } },
    ...more,
    xaxis: { ...axis, type: "date", range: shownTime(),
      tickformatstops: [{ dtickrange: [null, 59999], value: "%H:%M:%S" }, { dtickrange: [60000, null], value: "%H:%M" }],
      hoverformat: "%H:%M:%S", nticks: 5, showgrid: false },
    yaxis: { ...axis, rangemode: "tozero", ...more.yaxis },
    ...(more.yaxis2 ? { yaxis2: { ...axis, ...more.yaxis2 } } : {}),
  };
}

function plot(id, traces, more) {
  if (!window.Plotly) return;
  window.Plotly.react($(id), traces, layout(more), { displayModeBar: false, responsive: true, doubleClick: false });
}

function ticks(top) {
  const rough = top / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, n) => n * step);
}

function drawPool(x) {
  const m = state.memory;
  const ids = largest();
  const area = (name, y, fill) => ({
    x, y, name, stackgroup: "kv", mode: "lines", line: { width: 1, color: fill }, fillcolor: fill,
    hovertemplate: "%{y:,d} tokens",
  });
  const chosen = new Set(ids);
  const rest = state.samples.map((sample) => Object.entries(sample.sessions)
    .reduce((sum, [id, tokens]) => sum + (chosen.has(id) ? 0 : tokens), sample.other_tokens));
  const traces = ids.map((id) =>
    area(plain(title(id)), state.samples.map((sample) => sample.sessions[id] || 0), color(id)));
  const others = rest.some((tokens) => tokens > 0);
  if (others || !ids.length) traces.push(area(others ? "other" : "no session", rest, css("--series-other")));
  const peak = Math.max(0, ...state.samples.map((sample) =>
    sample.other_tokens + Object.values(sample.sessions).reduce((sum, tokens) => sum + tokens, 0)));
  const capacity = m.kv_capacity_tokens;
  const top = Math.max(capacity || 0, peak, 100) * 1.08;
  const perToken = m.kv_bytes_per_token;
  if (capacity) {
    traces.push({
      x: shownTime(), y: [capacity, capacity].map((t) => t * (perToken || 1)),
      yaxis: perToken ? "y2" : "y", name: "budget", mode: "lines", line: { color: css("--budget"), width: 1.5, dash: "dash" },
      hovertemplate: `${count(capacity)} tokens${perToken ? `, ${bytes(capacity * perToken)}` : ""}`,
    });
  }
  const at = ticks(top);
  plot("chart-kv", traces, {
    margin: { l: 56, r: perToken ? 68 : 12, t: 6, b: 24 },
    yaxis: { range: [0, top], tickvals: at, ticktext: at.map(count) },
    ...(perToken ? { yaxis2: { range: [0, top * perToken], overlaying: "y", side: "right", showgrid: false,
      tickvals: at.map((t) => t * perToken), ticktext: at.map((t) => bytes(t * perToken)) } } : {}),
  });
  drawLegend(ids, rest.at(-1) > 0, capacity);
}

function drawLegend(ids, other, capacity) {
  const wanted = ids.map((id) => [cut(title(id), 28), color(id)]);
  if (other) wanted.push(["other", css("--series-other")]);
  if (capacity) wanted.push(["budget (the whole pool)", css("--budget")]);
  const mark = JSON.stringify(wanted);
  const legend = $("legend");
  if (legend.dataset.mark === mark) return;
  legend.dataset.mark = mark;
  legend.replaceChildren(...wanted.map(([name, fill]) => make("li", {}, swatch(fill), name)));
}

function swatch(fill) {
  const node = make("span", { class: "swatch", "aria-hidden": "true" });
  node.style.backgroundColor = fill;
  return node;
}

function drawCharts() {
  const x = state.samples.map((sample) => new Date(sample.at_s * 1000));
  const line = (name, y, stroke, template) => ({
    x, y, name, mode: "lines", line: { color: stroke, width: 1.5, shape: "hv" }, hovertemplate: template });
  const most = Math.max(4, ...state.samples.map((s) => Math.max(s.running, s.waiting)));
  drawPool(x);
  plot("chart-queue", [
    line("running", state.samples.map((s) => s.running), css("--series-0"), "%{y}"),
    line("waiting", state.samples.map((s) => s.waiting), css("--budget"), "%{y}"),
  ], { yaxis: { range: [0, most * 1.1], nticks: 5, tickformat: "d" } });
  const slowest = Math.max(100, ...state.samples.map((s) => s.ttft_ms || 0));
  plot("chart-ttft", [line("TTFT", state.samples.map((s) => s.ttft_ms), css("--series-0"), "%{y:,.0f} ms")],
    { yaxis: { range: [0, slowest * 1.1], nticks: 5, tickformat: ",d" } });
  const shares = hitShares().map((share) => (share === null ? null : share * 100));
  plot("chart-hits", [line("found", shares, css("--series-2"), "%{y:.1f} %")],
    { yaxis: { range: [0, 105], nticks: 5, ticksuffix: " %" } });
}

// -- the list of sessions -----------------------------------------------------------------------------------------

const COLUMNS = ["turns", "resident", "held", "view", "log", "saved", "age", "ttl"];
const LABELS = { turns: "Turns", resident: "Resident", held: "Idle in engine", view: "View", log: "Log", saved: "Saved", age: "Age", ttl: "TTL left" };

function newRow(session) {
  const button = make("button", { type: "button", class: "pick" }, make("span", { class: "swatch" }), make("span", { class: "name" }));
  const cells = Object.fromEntries(COLUMNS.map((name) => [name, make("td", { class: name === "held" ? "n held" : "n", "data-label": LABELS[name] })]));
  const status = make("td", { class: "state" });
  const row = make("tr", {}, make("th", { scope: "row" }, button), status, ...Object.values(cells));
  row.addEventListener("click", () => select(session.id));
  return { row, button, status, cells };
}

function ttlLeft(session, now) {
  if (session.state === "active") return "in use";
  if (session.state === "expired" || session.state === "closed") return "over";
  return span(session.last_used_s + session.ttl_s - now);
}

function fillRow(parts, session, now) {
  const { row, button, status, cells } = parts;
  put(button.lastChild, session.title ? cut(session.title, 60) : session.id);
  button.title = session.title ? `${session.id}: ${session.title}` : session.id;
  button.firstChild.style.backgroundColor = session.tokens_resident ? color(session.id) : "transparent";
  const chosen = state.selected !== null && state.selected.id === session.id;
  button.setAttribute("aria-pressed", String(chosen));
  row.classList.toggle("chosen", chosen);
  put(status, session.state);
  status.dataset.state = session.state;
  put(cells.turns, count(session.turns));
  put(cells.resident, count(session.tokens_resident));
  put(cells.held, count(session.engine_tokens));
  put(cells.view, count(session.tokens_in_view));
  put(cells.log, count(session.tokens_in_log));
  put(cells.saved, count(session.tokens_saved));
  put(cells.age, span(now - session.created_s));
  put(cells.ttl, ttlLeft(session, now));
}

/** Newest first by birth, so that no row jumps while it is read; rows are kept, so that focus stays. */
function drawSessions() {
  const { sessions, now_s: now } = state.memory;
  document.body.toggleAttribute("data-held", sessions.some((session) => session.engine_tokens !== null));
  const order = [...sessions].sort((a, b) => b.created_s - a.created_s || (a.id < b.id ? -1 : 1));
  const alive = new Set(order.map((session) => session.id));
  for (const [id, parts] of state.rows) if (!alive.has(id)) { parts.row.remove(); state.rows.delete(id); }
  order.forEach((session, place) => {
    if (!state.rows.has(session.id)) state.rows.set(session.id, newRow(session));
    const parts = state.rows.get(session.id);
    fillRow(parts, session, now);
    const there = $("rows").children[place];
    if (there !== parts.row) $("rows").insertBefore(parts.row, there || null);
  });
  const most = sessions.length === SHOWN_SESSIONS ? `the ${SHOWN_SESSIONS} used last` : String(sessions.length);
  const budget = count(state.memory.budget_tokens);
  const saved = sessions.reduce((sum, session) => sum + session.tokens_saved, 0);
  const again = sessions.reduce((sum, session) => sum + session.tokens_prefilled_again, 0);
  const cost = again ? `, ${count(again)} prefilled again after compactions` : "";
  put("sessions-count", sessions.length ? `${most} · budget ${budget} each · ${count(saved)} tokens saved${cost}` : `none · budget ${budget} each`);
  $("empty").hidden = sessions.length > 0;
  put("empty", `No session yet. Point an agent at ${location.origin}/v1, or start a chat.`);
}

// -- one session --------------------------------------------------------------------------------------------------

function select(id, fresh = false) {
  if (state.selected && state.selected.id === id) return;
  state.selected = { id, fresh, log: [], view: null, seen: "" };
  $("messages").replaceChildren(make("p", { class: "quiet" }, fresh ? "A new session begins with your first message." : "Loading…"));
  showProblem(null);
  if (state.memory) drawSessions();
  drawDetail();
  if (!fresh) refresh();
}

const found = (id) => state.memory && state.memory.sessions.find((session) => session.id === id);

/** Where its KV is, as far as this key may see it. */
function where(session) {
  if (!session.engine) return "";
  return ` · ${session.engine}${session.engine_blocks === null ? "" : `, ${count(session.engine_blocks)} idle blocks`}`;
}

function drawDetail() {
  const chosen = state.selected;
  if (!chosen) return;
  const session = found(chosen.id);
  put("detail-title", session && session.title ? cut(session.title, 60) : chosen.id);
  const again = session && session.compactions
    ? ` · ${count(session.compactions)} compactions, ${count(session.tokens_prefilled_again)} tokens prefilled again` : "";
  put("detail-sub", session
    ? `${cut(session.id, 40)} · ${session.state} · view ${count(session.tokens_in_view)} of ${count(session.tokens_in_log)} tokens${where(session)}${again}`
    : "new session");
  if (session && !state.chat && `${session.head} ${session.state}` !== chosen.seen) refresh();
}

async function refresh() {
  const chosen = state.selected;
  const session = found(chosen.id);
  chosen.seen = session ? `${session.head} ${session.state}` : chosen.seen;
  try {
    const [log, view] = await Promise.all([ask(sessionPath(chosen.id, "/log")), ask(sessionPath(chosen.id, "/view"))]);
    if (state.selected !== chosen) return;
    chosen.log = log.data;
    chosen.view = view;
    chosen.fresh = false;
    if (!state.chat || state.chat.id !== chosen.id) drawMessages();
  } catch (error) {
    if (state.selected === chosen) showProblem(error);
  }
}

function textOf(message) {
  const parts = Array.isArray(message.content) ? message.content : [message.content];
  const texts = parts.map((part) => (typeof part === "string" ? part : part && typeof part.text === "string" ? part.text
    : part && part.type ? `[${part.type}]` : ""));
  const calls = (message.tool_calls || []).map((call) => `→ ${call.function?.name}(${call.function?.arguments})`);
  return [...texts, ...calls].filter(Boolean).join("\n");
}

/** What became of each entry of the log in the view: [word, explanation]. */
function fates(log, view) {
  const reduced = new Map();
  let epoch = null;
  const path = new Set(log.map((entry) => entry.hash));
  for (const decision of view ? view.decisions : []) {
    if (!path.has(decision.at)) continue;
    if (decision.kind === "distil") reduced.set(decision.at, decision.payload);
    if (decision.kind === "compact") epoch = decision.payload;
  }
  const pinned = log.findIndex((entry) => !["system", "developer"].includes(entry.message.role));
  return log.map((entry, place) => {
    if (place < pinned || pinned < 0) return ["pinned", "always in the view, byte for byte"];
    if (epoch && entry.depth <= epoch.through) return ["condensed", "only in the condensed part of the view"];
    if (epoch && epoch.overrides && entry.hash in epoch.overrides) return ["reduced", "shortened at the last compaction"];
    const cut_ = reduced.get(entry.hash);
    if (cut_) return ["reduced", `${count(cut_.tokens_before)} → ${count(cut_.tokens_after)} tokens on entry: ${cut_.why}`];
    return ["verbatim", "in the view as it was received"];
  });
}

function bubble(role, text, notes, extra = []) {
  const head = make("p", { class: "meta" }, make("b", {}, role));
  for (const note of notes) head.append(make("span", {}, note));
  head.append(...extra);
  return make("article", { class: "msg", "data-role": role }, head, make("div", { class: "body" }, cut(text, SHOWN_CHARS)));
}

function itemLink(id, hash, text = hash.slice(0, 12)) {
  const link = make("a", { href: sessionPath(id, `/items/${hash}`), title: "The whole item, as it was received" }, text);
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    showItem(link.getAttribute("href"), hash);
  });
  return link;
}

function logBubbles(chosen) {
  const all = fates(chosen.log, chosen.view);
  const first = Math.max(0, chosen.log.length - SHOWN_MESSAGES);
  return chosen.log.slice(first).map((entry, place) => {
    const [word, why] = all[first + place];
    const notes = [`${count(entry.tokens)} tokens`];
    if (entry.finish && entry.finish !== "stop") notes.push(entry.finish);
    const badge = make("span", { class: "badge", "data-fate": word, title: why }, word);
    const node = bubble(entry.message.role, textOf(entry.message), notes, [badge, itemLink(chosen.id, entry.hash)]);
    node.dataset.fate = word;
    if (word === "reduced") node.append(make("p", { class: "why" }, why));
    return node;
  });
}

/** Turns the hashes of the log's entries in a text into links to their items. */
function linkHashes(body, id, hashes) {
  const parts = body.textContent.split(/\b([0-9a-f]{8,32})\b/);
  if (parts.length === 1) return;
  body.replaceChildren(...parts.map((part, place) => {
    const hash = place % 2 ? hashes.find((known) => known.startsWith(part)) : undefined;
    return hash ? itemLink(id, hash, part) : part;
  }));
}

function viewBubbles(chosen) {
  const messages = chosen.view ? chosen.view.messages : [];
  const hashes = chosen.log.map((entry) => entry.hash);
  return messages.slice(-SHOWN_MESSAGES).map((message) => {
    const node = bubble(message.role, textOf(message), []);
    linkHashes(node.querySelector(".body"), chosen.id, hashes);
    return node;
  });
}

function drawMessages() {
  const chosen = state.selected;
  const box = $("messages");
  const low = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  const asLog = state.tab === "log";
  const nodes = asLog ? logBubbles(chosen) : viewBubbles(chosen);
  const total = asLog ? chosen.log.length : chosen.view ? chosen.view.messages.length : 0;
  if (total > SHOWN_MESSAGES) nodes.unshift(make("p", { class: "quiet" }, `${count(total - SHOWN_MESSAGES)} earlier messages are not shown.`));
  if (!nodes.length) nodes.push(make("p", { class: "quiet" }, "Nothing was said yet."));
  box.replaceChildren(...nodes);
  if (low) box.scrollTop = box.scrollHeight;
  drawNote();
}

function drawNote() {
  const { log, view } = state.selected;
  if (!view) return put("tab-note", "\u00a0");
  const words = fates(log, view).map(([word]) => word);
  const of = (word) => words.filter((w) => w === word).length;
  const summary = view.summary ? ` · the engine's summary was ${view.summary.outcome}${view.summary.reason ? `: ${view.summary.reason}` : ""}` : "";
  put("tab-note", state.tab === "log"
    ? `${count(log.length)} messages: ${of("condensed")} condensed, ${of("reduced")} reduced`
    : `${count(view.messages.length)} messages, ${count(view.tokens)} tokens${view.exact ? "" : " (estimate)"}: what the model sees${summary}`);
  return undefined;
}

function showTab(name) {
  state.tab = name;
  for (const tab of ["log", "view"]) {
    $(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
    $(`tab-${tab}`).tabIndex = tab === name ? 0 : -1;
  }
  $("messages").setAttribute("aria-labelledby", `tab-${name}`);
  if (state.selected && !state.chat) drawMessages();
}

async function showItem(path, hash) {
  try {
    const item = await ask(path);
    put("item-title", `Item ${hash}`);
    put("item-text", JSON.stringify(item, null, 2));
    $("item-dialog").showModal();
  } catch (error) {
    showProblem(error);
  }
}

function showProblem(error) {
  const box = $("problem");
  box.replaceChildren();
  if (!error) return;
  box.append(make("strong", {}, error.message || String(error)));
  if (error.hint) box.append(make("span", {}, ` ${error.hint}`));
}

// -- the chat -----------------------------------------------------------------------------------------------------

function newChat() {
  const random = crypto.getRandomValues(new Uint8Array(4));
  select(`chat-${[...random].map((n) => n.toString(16).padStart(2, "0")).join("")}`, true);
  $("text").focus();
}

/** The history to continue: the log without a question that never got its answer, so that asking again is a retry. */
function history(log) {
  const kept = log.map((entry) => entry.message);
  while (kept.length && kept.at(-1).role === "user") kept.pop();
  return kept;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).replace(/\r\n/g, "\n").split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((l) => l.startsWith("data:")).map((l) => l.slice(5).trimStart()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function send(text) {
  if (!state.selected) newChat();
  const chosen = state.selected;
  const session = found(chosen.id);
  const chat = state.chat = { id: chosen.id, abort: new AbortController(), text: "" };
  showProblem(null);
  drawStatus();
  try {
    const log = chosen.fresh ? [] : (await ask(sessionPath(chosen.id, "/log"))).data;
    showTab("log");
    const reply = beginReply(chosen, text);
    await stream(chat, { model: (session && session.model) || state.models[0], stream: true,
      messages: [...history(log), { role: "user", content: text }] }, reply);
    $("text").value = "";
  } catch (error) {
    if (error.name === "AbortError") $("text").value = "";
    else showProblem(error instanceof ApiError ? error : new ApiError(0, { message: "The connection broke off.", hint: String(error.message) }));
  } finally {
    state.chat = null;
    chosen.seen = "";
    chosen.fresh = false;
    drawStatus();
    poll();
  }
}

function beginReply(chosen, text) {
  const box = $("messages");
  if (!chosen.log.length) box.replaceChildren();
  const answer = bubble("assistant", "", ["waiting"]);
  answer.id = "reply";
  answer.setAttribute("aria-live", "polite");
  box.append(bubble("user", text, []), answer);
  box.scrollTop = box.scrollHeight;
  return answer;
}

async function stream(chat, body, reply) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", body: JSON.stringify(body), signal: chat.abort.signal,
    headers: headers({ "Content-Type": "application/json", "X-Session-ID": chat.id }),
  });
  if (!response.ok) throw await refused(response);
  const target = reply.querySelector(".body");
  for await (const event of events(response)) {
    if (event.error) throw new ApiError(response.status, event.error);
    const delta = event.choices?.[0]?.delta?.content;
    if (!delta) continue;
    put(reply.querySelector(".meta span"), "streaming");
    target.append(delta);
    $("messages").scrollTop = $("messages").scrollHeight;
  }
}

// -- the key ------------------------------------------------------------------------------------------------------

function askForKey(error) {
  const first = !state.needKey;
  state.needKey = true;
  put("key-why", `This deployment asks for an API key: ${error.message}.`);
  drawStatus();
  if (first && !$("key-dialog").open) openKey();
}

function openKey() {
  $("key").value = "";
  $("key-dialog").showModal();
}

function useKey(event) {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key-dialog").close();
  Object.assign(state, { needKey: false, problem: "", memory: null, samples: [], models: [], selected: null });
  drawStatus();
  poll();
}

// -- the whole ----------------------------------------------------------------------------------------------------

function draw() {
  drawFigures();
  drawCharts();
  drawSessions();
  drawDetail();
}

function start() {
  document.addEventListener("visibilitychange", poll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.memory && draw());
  $("new-button").addEventListener("click", newChat);
  $("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("text").value.trim();
    if (text && !state.chat) send(text);
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("chat").requestSubmit();
  });
  $("abort").addEventListener("click", () => state.chat && state.chat.abort.abort());
  for (const tab of ["log", "view"]) {
    $(`tab-${tab}`).addEventListener("click", () => showTab(tab));
    $(`tab-${tab}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tab === "log" ? "view" : "log";
      showTab(other);
      $(`tab-${other}`).focus();
    });
  }
  $("key-button").addEventListener("click", openKey);
  $("key-cancel").addEventListener("click", () => $("key-dialog").close());
  $("key-form").addEventListener("submit", useKey);
  $("item-close").addEventListener("click", () => $("item-dialog").close());
  poll();
}

start();
