/**
 * The server, as the page talks to it: the model's name, and answers as they come. Paths are relative to the page.
 */

const MODELS_DEADLINE_MS = 15_000;

/** What went wrong, in words for whoever sits in front of the page. */
export class Failure extends Error {
  /**
   * @param {string} message
   * @param {number | null} status of the HTTP answer, if there was one
   * @param {string | null} param what of the request is wrong, as the server calls it
   */
  constructor(message, status = null, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/**
 * The name of the model that is served.
 * @param {string | null} key
 * @param {AbortSignal} signal
 * @returns {Promise<string>} Throws Failure, or AbortError.
 */
export async function servedModel(key, signal) {
  const deadline = AbortSignal.timeout(MODELS_DEADLINE_MS);
  const either = AbortSignal.any?.([signal, deadline]) ?? deadline; // browsers of 2023 have no `any`
  const { data } = await jsonOf(await request("v1/models", key, { signal: either }));
  if (!data.length) throw new Failure("This key is not for the model that is served here.", 403);
  return data[0].id;
}

/**
 * An answer, piece by piece. When the signal aborts, the connection is closed, and the server frees what it held for it.
 * @param {object} body of /v1/chat/completions, without what is about streaming
 * @param {string | null} key
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<{text: string, tokens: number, finishReason: string | null}>} Throws Failure, or AbortError.
 */
export async function* answerTo(body, key, signal) {
  const response = await request("v1/chat/completions", key, {
    method: "POST",
    headers: { "content-type": "application/json" },
    // Token ids are the only exact count of an answer that is stopped.
    body: JSON.stringify({ ...body, stream: true, return_token_ids: true }),
    signal,
  });
  for await (const event of eventsOf(response, signal)) {
    if (event.error) throw new Failure(`The answer broke off. ${sentence(event.error.message)}`);
    for (const choice of event.choices) {
      const tokens = choice.token_ids?.length ?? 0;
      yield { text: choice.delta.content ?? "", tokens, finishReason: choice.finish_reason };
    }
  }
}

async function* eventsOf(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  let complete = false;
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw signal.aborted ? error : lost();
      });
      if (done && !complete) throw lost();
      if (done) return; // not at [DONE] already: to leave before the end would be to abort
      const events = (pending + value).split("\n\n");
      pending = events.pop();
      for (const event of events) {
        if (event.startsWith(":")) continue; // a sign of life
        const data = event.replace(/^data: /, "");
        complete = data === "[DONE]";
        if (!complete) yield JSON.parse(data);
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // of a stream that failed already, which is told elsewhere
  }
}

function lost() {
  return new Failure("The connection was lost before the answer was complete.");
}

/**
 * The answer at a path, relative to the page. Its body is still to be read.
 * @param {string} path
 * @param {string | null} key sent as Bearer token
 * @param {RequestInit} options
 * @returns {Promise<Response>} Throws Failure, or AbortError.
 */
export async function request(path, key, options) {
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new Failure("The server did not answer in time.");
    throw new Failure("The server can't be reached. Is it running, and are you connected?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/**
 * What an answer holds.
 * @param {Response} response
 * @returns {Promise<any>} Throws Failure, or AbortError.
 */
export async function jsonOf(response) {
  try {
    return await response.json();
  } catch (error) {
    throw error.name === "AbortError" ? error : lost();
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null); // a proxy's own error page is no JSON
  const said = sentence(body?.error?.message ?? `the server answered with status ${response.status}`);
  const wait = Number(response.headers.get("retry-after"));
  const again = wait > 0 ? ` Try again in ${wait} second${wait === 1 ? "" : "s"}.` : "";
  return new Failure(`${said}${again}`, response.status, body?.error?.param ?? null);
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
