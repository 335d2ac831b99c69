"use strict";

const $ = (id) => document.getElementById(id);
const messages = [];
const rates = [];
let model = null;
let running = null;
let before = null;

const key = $("key");
key.value = sessionStorage.getItem("key") ?? "";
key.addEventListener("change", () => {
  sessionStorage.setItem("key", key.value);
  start();
});

function headers() {
  const found = { "Content-Type": "application/json" };
  if (key.value) found.Authorization = `Bearer ${key.value}`;
  return found;
}

async function start() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    $("key-label").hidden = response.status !== 401 && !key.value;
    if (!response.ok) throw new Error((await response.json()).error.message);
    model = (await response.json()).data[0].id;
    $("model").textContent = model;
    $("status").textContent = "";
  } catch (error) {
    $("status").textContent = error.message;
  }
}

function show(kind, text) {
  const element = document.createElement("div");
  element.className = `message ${kind}`;
  element.textContent = text;
  $("messages").append(element);
  element.scrollIntoView({ block: "end" });
  return element;
}

/** The data of server-sent events, as they arrive. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield part.replace(/^data: /, "");
  }
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  show("user", text);
  const reply = { role: "assistant", content: "" };
  const element = show("assistant", "");
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const begun = performance.now();
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: running.signal,
      body: JSON.stringify({
        model,
        messages,
        stream: true,
        stream_options: { include_usage: true },
        temperature: Number($("temperature").value),
        max_completion_tokens: Number($("max-tokens").value),
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      reply.content += chunk.choices[0]?.delta.content ?? "";
      element.textContent = reply.content;
      element.scrollIntoView({ block: "end" });
      if (chunk.usage) {
        const seconds = (performance.now() - begun) / 1000;
        const { prompt_tokens: prompt, completion_tokens: made } = chunk.usage;
        $("status").textContent = `${prompt} prompt tokens, ${made} new in ${seconds.toFixed(1)} s`;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") $("status").textContent = "stopped";
    else show("error", error.message);
  } finally {
    if (reply.content) messages.push(reply);
    else {
      messages.pop();
      element.remove();
    }
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running || !model) return;
  $("prompt").value = "";
  ask(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("messages").replaceChildren();
});

/** Prometheus' text as a map: name with labels → value. */
function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const space = line.lastIndexOf(" ");
    if (line && !line.startsWith("#")) found.set(line.slice(0, space), Number(line.slice(space + 1)));
  }
  return found;
}

function mean(found, name) {
  const count = found.get(`${name}_count`);
  return count ? `${((1000 * found.get(`${name}_sum`)) / count).toFixed(1)} ms` : "–";
}

function drawRates() {
  const canvas = $("rate");
  const context = canvas.getContext("2d");
  const most = Math.max(1, ...rates);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = context.strokeStyle = "#3a6ea5";
  rates.forEach((rate, index) => {
    const height = (rate / most) * (canvas.height - 14);
    context.fillRect(index * 5, canvas.height - height, 4, height);
  });
  context.fillStyle = "#888";
  context.fillText(most.toFixed(0), 2, 10);
}

async function watch() {
  try {
    const response = await fetch("metrics", { headers: headers() });
    if (response.ok) showMetrics(parseMetrics(await response.text()));
  } catch {
    $("status").textContent = "the server does not answer";
  }
  setTimeout(watch, 2000);
}

function showMetrics(found) {
  const get = (name) => found.get(name) ?? 0;
  const total = get("npu_sim_new_tokens_total");
  const now = performance.now();
  if (before) {
    rates.push(Math.max(0, (1000 * (total - before.total)) / (now - before.now)));
    if (rates.length > 64) rates.shift();
    drawRates();
  }
  before = { total, now };
  const blocks = (state) => get(`npu_sim_cache_blocks{state="${state}"}`);
  const pool = blocks("used") + blocks("free") + blocks("cached");
  const rows = [
    ["Requests under way", get("npu_sim_requests_active")],
    ["Sequences in the batch", get("npu_sim_batch_size")],
    ["Requests in the queue", get("npu_sim_requests_waiting")],
    ["KV cache used", pool ? `${((100 * blocks("used")) / pool).toFixed(0)} %` : "–"],
    ["Prompt tokens", get("npu_sim_prompt_tokens_total")],
    ["of these from the cache", get("npu_sim_cached_tokens_total")],
    ["New tokens", total],
    ["Preemptions", get("npu_sim_preemptions_total")],
    ["Time to first token, mean", mean(found, "npu_sim_time_to_first_token_seconds")],
    ["Time between tokens, mean", mean(found, "npu_sim_time_between_tokens_seconds")],
  ];
  $("values").replaceChildren(
    ...rows.flatMap(([name, value]) => {
      const term = document.createElement("dt");
      const description = document.createElement("dd");
      term.textContent = name;
      description.textContent = value;
      return [term, description];
    }),
  );
}

start();
watch();
