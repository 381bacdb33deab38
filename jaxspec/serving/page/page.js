// Behaviour of the page: requests, replies and the conversation. Read `run` first.

import { Refused, events, json, useKey } from "./api.js";
import { Live } from "./live.js";
import { Reply, make, message } from "./reply.js";

const $ = (id) => document.getElementById(id);
const SAVED = "jaxspec.settings";
const MAX_TOKENS = 512; // default limit of new tokens
const POLL_MS = 2000;
const NEAR_PX = 80; // within this distance of its end, the conversation scrolls with new text
const ENDS = { length: "It came to its limit of tokens.", tool_calls: "It waits for what the tools say." };

const live = new Live();
let model = null; // as /v1/models has it
let conversation = []; // messages, without the system's
let images = []; // of the next message, as data URLs
let stopping = null; // the AbortController of the running request
let settings = load();

// --- asking ------------------------------------------------------------------------------------------

/** Ask for a reply, and show it while it comes. Returns whether there is one. */
async function run(path, body) {
  const reply = new Reply(model?.id ?? "Model");
  reply.article.classList.toggle("raw", "prompt" in body);
  const stop = new AbortController();
  begin(stop);
  show(reply.article);
  live.start();
  let end = "";
  let failed = null;
  try {
    await ready();
    for await (const event of events(path, { ...common(), ...body }, stop.signal)) {
      const stick = isAtEnd();
      for (const choice of event.choices) {
        reply.take(choice);
        live.take(choice.jaxspec?.steps ?? []);
      }
      if (stick) scroll();
    }
    end = ENDS[reply.reason] ?? "";
  } catch (error) {
    if (stop.signal.aborted) end = "Stopped.";
    else failed = error;
  }
  if (failed && !(failed instanceof Refused)) console.error(failed);
  const text = failed ? failed.message : [end, live.sentence()].filter(Boolean).join(" ");
  const stick = isAtEnd();
  reply.end(text, Boolean(failed));
  if (stick) scroll();
  finish(failed ? text : `Reply done. ${text}`);
  if (failed?.status === 401) askForKey();
  if (failed && !reply.content && !reply.reasoning) return null;
  return reply;
}

async function chat() {
  const mine = conversation; // another may have begun when the reply ends
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const body = { messages: [...system, ...mine], max_completion_tokens: maxTokens() };
  if (settings.thinking) {
    body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  }
  if (settings.tools) body.tools = JSON.parse(settings.tools);
  const reply = await run("v1/chat/completions", body);
  if (reply) {
    mine.push(reply.toMessage());
    if (reply.reason === "tool_calls") askForResults(reply);
  }
  return reply;
}

/** Return the fields of all requests. */
function common() {
  const body = { stream: true, return_steps: true };
  if (model) body.model = model.id;
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  if (settings.seed !== "") body.seed = Number(settings.seed);
  return body;
}

function maxTokens() {
  if (settings.most !== "") return Number(settings.most);
  return model ? Math.max(1, Math.min(MAX_TOKENS, Math.floor(model.max_model_len / 2))) : MAX_TOKENS;
}

async function send() {
  const text = $("prompt").value;
  const mine = conversation;
  const mode = new FormData($("ask")).get("mode");
  const seen = mode === "chat" ? images : []; // a text that is continued has none
  if ((!text.trim() && !seen.length) || stopping) return;
  const asked = message("user", mode === "chat" ? "You" : "Text");
  asked.classList.toggle("raw", mode === "text");
  if (seen.length) asked.append(pictures(seen));
  asked.append(make("div", "text", text));
  show(asked);
  $("prompt").value = "";
  if (seen.length) showImages([]);
  let reply;
  if (mode === "chat") {
    const parts = seen.map((url) => ({ type: "image_url", image_url: { url } }));
    if (text.trim()) parts.push({ type: "text", text });
    conversation.push({ role: "user", content: seen.length ? parts : text });
    reply = await chat();
  } else {
    reply = await run("v1/completions", { prompt: text, max_tokens: maxTokens() });
  }
  if (!reply) {
    if (mode === "chat") mine.pop();
    if (!$("prompt").value) $("prompt").value = text; // to be sent again
    if (!images.length) showImages(seen);
  }
}

// --- images ------------------------------------------------------------------------------------------

/** Add the images among dropped or pasted files to the next message. */
function addImages(event, { files }) {
  const chosen = [...files].filter((file) => file.type.startsWith("image/"));
  if (!chosen.length) return;
  event.preventDefault();
  for (const file of chosen) {
    const reader = new FileReader();
    reader.addEventListener("load", () => showImages([...images, reader.result]));
    reader.readAsDataURL(file);
  }
}

/** Set the images of the next message, and show each as a button that takes it away. */
function showImages(urls) {
  images = urls;
  $("images").hidden = !images.length;
  $("images").replaceChildren(
    ...images.map((url, index) => {
      const button = make("button", "picture");
      button.type = "button";
      button.title = "Take it away";
      button.append(picture(url, index));
      button.addEventListener("click", () => showImages(images.filter((_, i) => i !== index)));
      return button;
    }),
  );
}

function picture(url, index) {
  const image = make("img");
  image.src = url;
  image.alt = `Image ${index + 1}`;
  return image;
}

function pictures(urls) {
  const row = make("div", "pictures");
  row.append(...urls.map(picture));
  return row;
}

/** Ask for the results of the called tools, and go on with them. */
function askForResults(reply) {
  const form = make("form", "results");
  for (const call of reply.calls) {
    const label = make("label", "", `What ${call.name} says`);
    const field = make("textarea");
    field.rows = 2;
    label.append(field);
    form.append(label);
  }
  form.append(make("button", "main", "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (stopping) return;
    const fields = form.querySelectorAll("textarea");
    reply.calls.forEach((call, index) => {
      const content = fields[index].value;
      conversation.push({ role: "tool", tool_call_id: call.id, name: call.name, content });
      const shown = message("tool", call.name);
      shown.append(make("div", "text", content));
      show(shown);
    });
    form.remove();
    chat();
  });
  reply.article.append(form);
  scroll();
}

// --- the conversation --------------------------------------------------------------------------------

function begin(stop) {
  stopping = stop;
  const hadFocus = document.activeElement === $("send");
  $("send").hidden = true;
  $("stop").hidden = false;
  if (hadFocus) $("stop").focus();
  $("messages").setAttribute("aria-busy", "true");
  $("told").textContent = "The model writes.";
}

function finish(text) {
  stopping = null;
  const hadFocus = document.activeElement === $("stop");
  $("stop").hidden = true;
  $("send").hidden = false;
  if (hadFocus) $("prompt").focus();
  $("messages").removeAttribute("aria-busy");
  $("told").textContent = text;
}

function show(article) {
  $("welcome").hidden = true;
  $("messages").append(article);
  scroll();
}

function isAtEnd() {
  const { scrollHeight, scrollTop, clientHeight } = $("messages");
  return scrollHeight - scrollTop - clientHeight < NEAR_PX;
}

function scroll() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

function clear() {
  stopping?.abort();
  conversation = [];
  showImages([]);
  for (const article of $("messages").querySelectorAll("article")) article.remove();
  $("welcome").hidden = false;
  live.clear();
  $("prompt").focus();
}

// --- settings and the key ----------------------------------------------------------------------------

function load() {
  const plain = { temperature: "", most: "", seed: "", thinking: "", system: "", tools: "" };
  try {
    return { ...plain, ...JSON.parse(localStorage.getItem(SAVED)) };
  } catch {
    return plain;
  }
}

function openSettings() {
  const form = $("settings").querySelector("form");
  for (const [name, value] of Object.entries(settings)) form.elements[name].value = value;
  checkTools(form.elements.tools);
  $("settings").showModal();
}

function checkTools(field) {
  let wrong = "";
  try {
    if (field.value.trim() && !Array.isArray(JSON.parse(field.value))) wrong = "Expected a list.";
  } catch (error) {
    wrong = `This is no JSON: ${error.message}`;
  }
  field.setCustomValidity(wrong);
}

function saveSettings(form) {
  for (const name of Object.keys(settings)) settings[name] = form.elements[name].value.trim();
  try {
    localStorage.setItem(SAVED, JSON.stringify(settings));
  } catch {
    // a browser without storage
  }
  $("settings").close();
}

function askForKey() {
  if (!$("key").open) $("key").showModal();
}

/** Read the server's models. */
async function meet() {
  try {
    const { data } = await json("v1/models");
    model = data[0];
    $("model").textContent = model.id;
    document.title = `${model.id} · jaxspec`;
  } catch (error) {
    if (error.status === 401) askForKey();
    return;
  }
  const messages = [{ role: "user", content: "a" }];
  const canChat = await json("tokenize", { messages }).then(
    () => true,
    (error) => error.status !== 400,
  );
  if (canChat) return;
  const [chats, text] = $("ask").elements.mode;
  chats.disabled = true;
  chats.parentNode.title = "This model has no chat template.";
  text.checked = true;
  $("welcome").querySelector("[data-mode=chat]").hidden = true;
}

/** Wait for the name of the model, if it is not known yet. */
async function ready() {
  if (!model) await meet();
}

/** Show the server's state until it is ready. */
async function watch() {
  let state;
  try {
    ({ status: state } = await json("health"));
  } catch {
    state = "not reachable";
  }
  $("state").textContent = state;
  $("state").hidden = state === "ready";
  setTimeout(watch, state === "ready" ? 10 * POLL_MS : POLL_MS);
}

// --- wiring ------------------------------------------------------------------------------------------

function submitted(form, then) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    then(form);
  });
}

submitted($("ask"), send);
submitted($("settings").querySelector("form"), saveSettings);
submitted($("key").querySelector("form"), (form) => {
  useKey(form.elements.key.value);
  form.reset();
  $("key").close();
  meet();
});
for (const dialog of [$("settings"), $("key")]) {
  dialog.querySelector("[value=cancel]").addEventListener("click", () => dialog.close());
}
$("settings").querySelector("[name=tools]").addEventListener("input", (e) => checkTools(e.target));
$("settings-open").addEventListener("click", openSettings);
$("clear").addEventListener("click", clear);
$("stop").addEventListener("click", () => stopping?.abort());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("prompt").addEventListener("paste", (event) => addImages(event, event.clipboardData));
document.addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) event.preventDefault(); // else the browser opens the file
});
document.addEventListener("drop", (event) => {
  if (!document.querySelector("dialog[open]")) addImages(event, event.dataTransfer);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stopping?.abort();
});
for (const example of $("welcome").querySelectorAll("button")) {
  example.addEventListener("click", () => {
    $("prompt").value = example.textContent;
    $("ask").elements.mode.value = example.dataset.mode;
    $("prompt").focus();
    send();
  });
}
$("colour").addEventListener("change", (event) => {
  document.body.classList.toggle("plain", !event.target.checked);
});
for (const span of document.querySelectorAll(".legend .draft")) {
  span.style.setProperty("--depth", span.dataset.depth);
}
$("live").open = matchMedia("(min-width: 56rem)").matches;
live.clear();
watch();
meet();
