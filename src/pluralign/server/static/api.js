// The server's side of the page. A key, where one is needed, is asked for once and kept in this tab.

const STORED = "pluralign-key";
let key = remembered();
let askForKey = null;

function remembered() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return ""; // storage may be forbidden
  }
}

/** Give the function that asks for a key: it is told whether one was refused, and promises another. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** Call the server: POST where there is a body. Throws an Error whose message is a sentence for people. */
export async function call(path, body = undefined) {
  for (;;) {
    const response = await sent(path, body);
    if (response.status !== 401) return read(response);
    key = await askForKey(Boolean(key));
    try {
      sessionStorage.setItem(STORED, key);
    } catch {
      // then it is kept until the page is left
    }
  }
}

async function sent(path, body) {
  const headers = { Accept: "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    const method = body === undefined ? "GET" : "POST";
    return await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Error("The server does not answer. Is it still running?");
  }
}

async function read(response) {
  let found = null;
  try {
    found = await response.json();
  } catch {
    throw new Error(`The server answered with something else than JSON (status ${response.status}).`);
  }
  if (!response.ok) throw new Error(found?.error?.message ?? `The server refused this (status ${response.status}).`);
  return found;
}
