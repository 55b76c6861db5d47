// Yet to come.

import { make } from "./dom.js";

export function show(container) {
  container.append(make("p", { text: "..." }));
}
