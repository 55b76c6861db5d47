// The frame around the views: tabs, the state in the address, questions to the server, errors, dark and light.
//
// A view is a module that exports `show(container, state, shell)`. It is shown anew when its tab is opened, and when the
// address changes by hand; `state` is what stands behind `#view?`. What it returns, if anything, is called when it goes.

import { make } from "./dom.js";
import { followTheme, themeButton } from "./chart.js";

const VIEWS = [["planner", "Planner"], ["runs", "Runs"], ["viewer", "Viewer"], ["explain", "Explain"], ["cards", "Cards × models"]];

class Shell {
  constructor() {
    this.client = crypto.getRandomValues(new Uint32Array(2)).join("-"); // of its questions only the newest counts
    this.tabs = new Map(VIEWS.map(([name, title]) => [name, make("a", { href: `#${name}`, text: title })]));
    this.notice = make("div", { class: "notices", role: "alert" });
    this.container = make("main", { id: "view", tabindex: -1 });
    document.getElementById("page").replaceChildren(
      make("header", { class: "bar" }, make("span", { class: "brand", text: "memfit" }), make("nav", { class: "tabs", "aria-label": "Views" }, [...this.tabs.values()]), themeButton()),
      this.notice, this.container);
  }

  // -- the address: #view?name=value

  read() {
    const [name, query = ""] = location.hash.slice(1).split(/\?(.*)/s);
    return { name: this.tabs.has(name) ? name : "planner", state: Object.fromEntries(new URLSearchParams(query)) };
  }

  // Without a new entry in the history: a slider would fill it.
  keep(state) {
    const { name } = this.read();
    history.replaceState(null, "", this.link(name, state));
    this.tabs.get(name).href = this.link(name, state); // a tab opens its view as it was left
  }

  link(name, state = {}) {
    return `#${name}${asQuery(state)}`;
  }

  go(name, state = {}) {
    location.hash = this.link(name, state);
  }

  async open() {
    const { name, state } = this.read();
    for (const [each, tab] of this.tabs) {
      if (each === name) {
        tab.setAttribute("aria-current", "page");
        tab.scrollIntoView({ block: "nearest", inline: "nearest" }); // on a phone they are wider than the bar
      } else tab.removeAttribute("aria-current");
    }
    this.tabs.get(name).href = this.link(name, state);
    document.title = `${this.tabs.get(name).textContent} · memfit`;
    delete document.documentElement.dataset.ready;
    this.say();
    this.leave?.();
    this.leave = null;
    const turn = (this.turn = {});
    try {
      const view = await import(`./${name}.js`);
      if (turn !== this.turn) return;
      const container = make("div", { class: "view" });
      this.container.replaceChildren(container);
      const leave = await view.show(container, state, this);
      if (turn !== this.turn) leave?.(); else this.leave = leave;
    } catch (error) {
      if (turn === this.turn) this.complain(error);
    }
    document.documentElement.dataset.ready = name;
  }

  // -- questions to the server

  get(path, query = {}, options = {}) {
    return this.ask(`${path}${asQuery(query)}`, options);
  }

  post(path, body, options = {}) {
    return this.ask(path, { ...options, method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  }

  async ask(path, options = {}) {
    let response;
    try {
      response = await fetch(path, { credentials: "same-origin", ...options });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused(0, "the server does not answer", "is `memfit serve` still running?");
    }
    const body = await response.json().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Refused(response.status, `the server answered ${response.status}, and nothing that can be read`);
    });
    if (!response.ok) throw new Refused(response.status, body.error, body.hint);
    return body;
  }

  // -- what went wrong, in words

  complain(error) {
    if (error.name === "AbortError") return;
    const known = error instanceof Refused;
    if (!known) console.error(error);
    this.say(known ? error.message : `this page failed: ${error.message}`, known ? error.hint : "please report it");
  }

  say(message = "", hint = "") {
    const lines = [message && make("b", { text: message }), hint && make("p", { text: hint })].filter(Boolean);
    this.notice.replaceChildren(...(lines.length ? [make("div", { class: "message bad" }, make("div", {}, lines))] : []));
  }
}

export class Refused extends Error {
  constructor(status, message, hint) {
    super(message);
    this.name = "Refused";
    this.status = status;
    this.hint = hint;
  }
}

function asQuery(state) {
  const known = Object.entries(state).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return known.length ? `?${new URLSearchParams(known)}` : "";
}

followTheme();
const shell = new Shell();
addEventListener("hashchange", () => shell.open());
shell.open();
