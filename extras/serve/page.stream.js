// Ask a server with OpenAI's interface for a completion and read its stream, token by token.

const GONE = "The server does not answer. See whether it still runs, then try again.";

/** What `promise` gives; a connection that fails is told in words that help. */
async function answered(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(GONE);
  }
}

/** The server's response; where it refuses, an Error with its own words, or its status. */
async function ask(path, key, options) {
  const login = key && { Authorization: `Bearer ${key}` };
  const headers = { "Content-Type": "application/json", ...login };
  const response = await answered(fetch(path, { ...options, headers }));
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  const said = `The server says ${response.status} ${response.statusText}.`;
  throw Object.assign(new Error(answer?.error?.message || said), { status: response.status });
}

/** The data of each server-sent event, however the network cuts them into pieces. */
async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder(); // keeps the bytes of half a character for the next piece
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await answered(reader.read());
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const parts = rest.split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}

/** The tokens of a choice, {name, logprob, top}, each with its `start` in the whole text. */
function tokensOf({ text, logprobs }, start) {
  if (!logprobs) return text ? [{ start }] : [];
  return logprobs.tokens.map((name, i) => ({
    name,
    start: logprobs.text_offset[i],
    logprob: logprobs.token_logprobs[i],
    top: logprobs.top_logprobs?.[i],
  }));
}

/** The parts of an answer that has begun: {tokens, grown, reason}; the last one has the reason.
 *
 *  A token's `text` goes from its start to the next one's. What may become a stop or is half a
 *  character is told later than its token is: `grown` are tokens of earlier parts whose text is
 *  longer now. Starts count code points, as Python does, and not JavaScript's UTF-16 units.
 */
async function* parts(body) {
  const letters = [];
  let open = []; // tokens whose text is not all there, or may not be
  for await (const data of events(body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    if (!event.choices?.length) continue;
    const choice = event.choices[0];
    const tokens = tokensOf(choice, letters.length);
    letters.push(...choice.text);
    const all = [...open, ...tokens];
    const grown = [];
    all.forEach((token, i) => {
      const text = letters.slice(token.start, all[i + 1]?.start).join("");
      if (i < open.length && text !== token.text) grown.push(token);
      token.text = text;
    });
    open = all.filter((_, i) => !(all[i + 1]?.start <= letters.length));
    yield { tokens, grown, reason: choice.finish_reason };
  }
  throw new Error("The connection ended before the text did.");
}

/** Send a request; once the server has taken it, an iterator over the parts of its answer.
 *
 *  key: of the API, or "". Throws an Error with a message for people and perhaps an HTTP status,
 *  or AbortError when `signal` says so.
 */
export async function complete(request, key, signal) {
  const body = JSON.stringify({ ...request, stream: true, logprobs: 10 });
  return parts((await ask("v1/completions", key, { method: "POST", body, signal })).body);
}

/** The name of the model that is served. */
export async function modelName(key) {
  const models = await (await ask("v1/models", key)).json();
  return models.data[0].id;
}
