// The official TypeScript client, second generation, in both protocol eras.
//
// Arguments: "stdio" and the server's command, or "http" and its address; the token of the latter is in CELLBLOCK_TOKEN.

import assert from 'node:assert/strict';

import { Client, StreamableHTTPClientTransport } from '@modelcontextprotocol/client';
import { StdioClientTransport } from '@modelcontextprotocol/client/stdio';
import { run, story, target } from './story.mjs';

await run(async () => {
  const { stdio, url, options } = target();
  for (const [mode, version] of [['legacy', '2025-11-25'], ['auto', '2026-07-28']]) {
    const client = new Client({ name: 'typescript-v2', version: '1' }, { versionNegotiation: { mode } });
    await client.connect(stdio ? new StdioClientTransport(stdio) : new StreamableHTTPClientTransport(url, options));
    assert.equal(client.getNegotiatedProtocolVersion(), version);
    await story(client, 'typescript-v2', (name, argumentsOf, more) => client.callTool({ name, arguments: argumentsOf }, more));
    await client.close();
  }
});
