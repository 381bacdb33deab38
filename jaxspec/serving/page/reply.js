// Messages on the page. All text is inserted as text, never as markup.

import { depth } from "./live.js";

/** Make an element with a class and a text. */
export function make(name, kind, text) {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Return a message: an article with a heading. */
export function message(kind, who) {
  const article = make("article", `message ${kind}`);
  article.append(make("h3", "who", who));
  return article;
}

/** A reply that is being written. */
export class Reply {
  content = "";
  reasoning = "";
  calls = []; // {id, name, arguments}
  reason = null;
  #steps = 0;

  constructor(who) {
    this.article = message("model", who);
    this.#thinking = make("details", "thinking");
    this.#thinking.hidden = true;
    this.#thinking.append(make("summary", "", "Thinking"), make("div", "text"));
    this.#text = make("div", "text");
    this.#calls = make("div", "calls");
    this.#end = make("p", "end");
    this.article.append(this.#thinking, this.#text, this.#calls, this.#end);
  }

  #thinking;
  #text;
  #calls;
  #end;

  /** Show the new content of an event. */
  take(choice) {
    const extension = choice.jaxspec;
    if (extension) {
      for (const step of extension.steps) this.#step(step);
      if (extension.rest) this.#show(extension.rest);
    } else {
      this.#show(choice.delta ?? choice);
    }
    this.reason = choice.finish_reason ?? this.reason;
  }

  /** Show the reply's end. `wrong` marks an error. */
  end(text, wrong = false) {
    this.#end.textContent = text;
    this.#end.classList.toggle("wrong", wrong);
    if (this.reason !== "tool_calls") {
      for (const call of this.#calls.querySelectorAll(".call")) call.classList.add("broken");
    }
  }

  /** Return the reply as a message of the conversation. */
  toMessage() {
    const made = { role: "assistant", content: this.content };
    if (this.reasoning) made.reasoning = this.reasoning;
    if (this.reason === "tool_calls") {
      made.tool_calls = this.calls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    }
    return made;
  }

  #step({ drafted, accepted, tokens }) {
    this.#steps += 1;
    tokens.forEach((token, position) => {
      const mark = make("span", position < accepted ? "draft" : "own");
      if (position < accepted) mark.style.setProperty("--depth", depth(position, drafted));
      this.#show(token, { mark, drafted, accepted });
    });
  }

  #show(fields, of) {
    const content = fields.content ?? fields.text;
    if (fields.reasoning) {
      this.reasoning += fields.reasoning;
      this.#thinking.hidden = false;
      this.#put(this.#thinking.lastChild, fields.reasoning, of);
    }
    if (content) {
      this.content += content;
      this.#put(this.#text, content, of);
    }
    for (const call of fields.tool_calls ?? []) this.#call(call);
  }

  #put(parent, text, of) {
    if (!of) {
      parent.append(text);
      return;
    }
    let step = parent.lastChild;
    if (step?.number !== this.#steps) {
      step = make("span", "step");
      step.number = this.#steps;
      const which = of.drafted ? `${of.accepted} of ${of.drafted} drafts accepted` : "no drafts";
      step.title = `Step ${this.#steps}: ${which}`;
      parent.append(step);
    }
    of.mark.textContent = text;
    step.append(of.mark);
  }

  #call({ index, id, function: call }) {
    if (call.name !== undefined) {
      const box = make("details", "call");
      box.open = true;
      const summary = make("summary", "", "Tool call: ");
      summary.append(make("code", "", call.name));
      box.append(summary, make("pre"));
      this.#calls.append(box);
      this.calls[index] = { id, name: call.name, arguments: "" };
    }
    this.calls[index].arguments += call.arguments;
    this.#calls.children[index].lastChild.textContent = this.calls[index].arguments;
  }
}
