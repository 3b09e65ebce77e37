// Requests to the server. If it requires an API key, the user enters it once, and it is kept in this tab.

const STORED = "pluralign-key";
let key = storedKey();
let askForKey = null;

function storedKey() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return ""; // storage may be forbidden
  }
}

/** Set the function that asks the user for a key. It gets whether a key was rejected, and returns a promise. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** Send a request: POST if there is a body. Throws an Error with a readable message. */
export async function call(path, body = undefined) {
  for (;;) {
    const response = await send(path, body);
    if (response.status !== 401) return read(response);
    key = await askForKey(Boolean(key));
    try {
      sessionStorage.setItem(STORED, key);
    } catch {
      // without storage the key lasts until the page is closed
    }
  }
}

async function send(path, body) {
  const headers = { Accept: "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    const method = body === undefined ? "GET" : "POST";
    return await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Error("No response from the server. Is it still running?");
  }
}

async function read(response) {
  let content = null;
  try {
    content = await response.json();
  } catch {
    throw new Error(`The response of the server is not JSON (status ${response.status}).`);
  }
  if (response.ok) return content;
  throw new Error(content?.error?.message ?? `The server rejected the request (status ${response.status}).`);
}
