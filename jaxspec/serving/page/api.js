// Requests to the server of the page. Paths are relative, so that a proxy may add a prefix.

const KEY = "jaxspec.key";

/** A refusal, or a lost connection. `status` is HTTP's; 0: the server did not answer. */
export class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Keep the API key for this tab. */
export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Return the JSON of a reply. A body makes it a POST. */
export async function json(path, body) {
  return (await request(path, body)).json();
}

/** Yield the events of a stream. Throws if the stream ends too early. */
export async function* events(path, body, signal) {
  const reply = await request(path, body, signal);
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Refused("The connection was lost.");
    });
    if (done) throw new Refused("The connection ended before the reply did.");
    text += decoder.decode(value, { stream: true });
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const event of whole) {
      if (!event.startsWith("data: ")) continue; // a comment, while the server has nothing to tell
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const read = JSON.parse(data);
      if (read.error) throw new Refused(read.error.message, 500);
      yield read;
    }
  }
}

async function request(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = { headers, signal };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer.");
  }
  if (reply.ok || path === "health") return reply;
  const detail = await reply.json().catch(() => ({}));
  throw new Refused(detail.error?.message ?? `The server says ${reply.status}.`, reply.status);
}
