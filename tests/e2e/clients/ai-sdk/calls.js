// The Vercel AI SDK with tools and objects, against a running service; prints what it got as JSON.
//
//     node calls.js URL KEY MODEL        (tests/e2e/test_service_agent_clients.py runs it in the SDK's environment)

import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, key, name] = process.argv.slice(2);
const options = { name: 'garnish', baseURL: `${url}/v1`, apiKey: key };
const providers = {
  'openai-compatible': createOpenAICompatible({ ...options, supportsStructuredOutputs: true })(name),
  openai: createOpenAI(options).chat(name),
};

const prompt = 'Where is my order 1043?';
const number = z.number().int().min(0).max(99999);
const schema = z.object({ topic: z.enum(['delivery', 'refund', 'damage']), order: number });
const tools = {
  find_tea: tool({
    description: 'Finds a tea of the shop',
    inputSchema: z.object({ kind: z.enum(['black', 'green']) }),
    execute: async ({ kind }) => ({ kind, price: 12 }),
  }),
  order_status: tool({
    description: 'Says where an order is',
    inputSchema: z.object({ order_id: number }),
    execute: async ({ order_id }) => ({ order_id, state: 'sent' }),
  }),
};
const settings = { prompt, temperature: 1, seed: 5, maxOutputTokens: 200, maxRetries: 0 };
// Calls a tool first, and answers after its result.
const loop = {
  ...settings,
  tools,
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? 'auto' : 'required' }),
};
const callsOf = (steps) => steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input]));

async function agent(model) {
  const { steps, text } = await generateText({ ...loop, model });
  return { calls: callsOf(steps), text, steps: steps.length };
}

async function agentStreamed(model) {
  const stream = streamText({ ...loop, model });
  let text = '';
  for await (const part of stream.textStream) text += part;
  const steps = await stream.steps;
  return { calls: callsOf(steps), text, steps: steps.length };
}

async function named(model) {
  const toolChoice = { type: 'tool', toolName: 'order_status' };
  return callsOf((await generateText({ ...settings, model, tools, toolChoice })).steps)[0];
}

async function objectStreamed(model) {
  const stream = streamObject({ ...settings, model, schema });
  for await (const part of stream.partialObjectStream) void part;
  return await stream.object;
}

const answers = {};
for (const [provider, model] of Object.entries(providers)) {
  answers[provider] = {
    agent: await agent(model),
    'agent, streamed': await agentStreamed(model),
    named: await named(model),
    object: (await generateObject({ ...settings, model, schema })).object,
    'object, streamed': await objectStreamed(model),
    output: (await generateText({ ...settings, model, output: Output.object({ schema }) })).output,
  };
}
console.log(JSON.stringify(answers));
