// The official TypeScript client, first generation.
//
// Arguments: "stdio" and the server's command, or "http" and its address; the token of the latter is in CELLBLOCK_TOKEN.

import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StdioClientTransport } from '@modelcontextprotocol/sdk/client/stdio.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';
import { run, story, target } from './story.mjs';

await run(async () => {
  const { stdio, url, options } = target();
  const client = new Client({ name: 'typescript-v1', version: '1' });
  await client.connect(stdio ? new StdioClientTransport(stdio) : new StreamableHTTPClientTransport(url, options));
  const call = (name, argumentsOf, more) => client.callTool({ name, arguments: argumentsOf }, undefined, more);
  await story(client, 'typescript-v1', call);
  await client.close();
});
