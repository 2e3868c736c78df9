// openai-node as a client, for `node --test`. PACELINE_PACKAGES is the folder with node_modules.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";

const resolve = createRequire(`${process.env.PACELINE_PACKAGES}/x.js`);
const { default: OpenAI } = resolve("openai");
const url = process.env.PACELINE_URL;
const model = process.env.PACELINE_MODEL;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Write a short story about a cat." }];

test("models", async () => {
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  assert.deepEqual(ids, [model]);
});

test("a streamed chat has the same text", async () => {
  const asked = { model, messages, seed: 11, max_tokens: 24 };
  const whole = await client.chat.completions.create(asked);
  let text = "";
  let usage = null;
  const chunks = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of chunks) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  const final = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
});

test("speculation changes no text", async () => {
  const texts = [];
  for (const speculative_config of [false, true, 3]) {
    const answer = await client.chat.completions.create({ model, messages, seed: 4, max_tokens: 24, speculative_config });
    texts.push(answer.choices[0].message.content);
  }
  assert.equal(new Set(texts).size, 1);
});

test("completions with logprobs", async () => {
  const answer = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 4, echo: true, logprobs: 1 });
  assert.equal(answer.choices[0].logprobs.tokens.join(""), answer.choices[0].text);
});

test("responses", async () => {
  const asked = { model, input: "Write a story.", max_output_tokens: 12, temperature: 0 };
  const whole = await client.responses.create(asked);
  const events = [];
  for await (const event of client.responses.stream(asked)) events.push(event);
  assert.equal(events.at(-1).type, "response.incomplete");
  const deltas = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
  assert.equal(deltas.join(""), whole.output_text);
});

test("a schema", async (t) => {
  const schema = { type: "object", properties: { legs: { enum: [3, 4] } }, required: ["legs"], additionalProperties: false };
  const response_format = { type: "json_schema", json_schema: { name: "pet", schema, strict: true } };
  let answer;
  try {
    answer = await client.chat.completions.parse({ model, messages, max_tokens: 32, response_format });
  } catch (error) {
    if (error.code !== "unsupported_parameter") throw error;
    t.skip("this version of the server has no grammars");
    return;
  }
  assert.ok([3, 4].includes(answer.choices[0].message.parsed.legs));
});

test("errors have their classes", async () => {
  await assert.rejects(client.chat.completions.create({ model: "other", messages }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
    assert.ok(error.requestID);
    return true;
  });
  await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), OpenAI.BadRequestError);
});

test("a stream that its client aborts", async () => {
  const stream = await client.completions.create({ model, prompt: "Once", max_tokens: 1000, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
  stream.controller.abort();
  assert.ok((await client.completions.create({ model, prompt: "Once", max_tokens: 2 })).choices[0].text);
});
