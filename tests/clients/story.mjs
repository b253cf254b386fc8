// What every client does with the server, told once for both generations of the TypeScript client.
//
// `call(name, arguments, options)` calls a tool; `options` may hold a signal and a listener for progress.

import assert from 'node:assert/strict';

/** Lists tools, runs cells, gets a plot, cancels. */
export async function story(client, session, call) {
  const tools = (await client.listTools()).tools.map((tool) => tool.name);
  for (const name of ['execute_ipython_cell', 'reset', 'fork_session']) {
    assert.ok(tools.includes(name), `${name} is not in ${tools}`);
  }
  const cell = (code, options) => call('execute_ipython_cell', { code, session_id: session }, options);

  assert.equal((await cell('x = 20 + 1; print(x)')).content[0].text, '21');
  const product = await cell('x * 2');
  assert.equal(product.content[0].text, '42');
  assert.equal(product.structuredContent.status, 'ok');

  const failed = await cell('1 / 0');
  assert.ok(failed.isError && failed.content[0].text.includes('ZeroDivisionError'), JSON.stringify(failed));

  const plot = await cell('import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()');
  const images = plot.content.filter((block) => block.type === 'image');
  assert.equal(images.length, 1);
  assert.equal(Buffer.from(images[0].data, 'base64').toString('latin1', 1, 4), 'PNG');

  const controller = new AbortController();
  await new Promise((begun, failure) => {
    const onprogress = ({ message }) => (message ?? '').includes('begun') && begun();
    const options = { signal: controller.signal, onprogress };
    const running = cell("print('begun', flush=True)\nwhile True: pass", options);
    running.then(() => failure(new Error('a cell without end has ended')), (error) => controller.signal.aborted || failure(error));
  });
  controller.abort('a test');
  // The session serves the next cell only when the cancelled one has been stopped.
  assert.equal((await cell('x')).content[0].text, '21');
  await call('close_session', { session_id: session });
}

/** What a client needs to reach the server that the arguments name. */
export function target() {
  const [transport, ...rest] = process.argv.slice(2);
  if (transport === 'stdio') {
    return { stdio: { command: rest[0], args: rest.slice(1), env: process.env, stderr: 'inherit' } };
  }
  const requestInit = { headers: { Authorization: `Bearer ${process.env.CELLBLOCK_TOKEN}` } };
  return { url: new URL(rest[0]), options: { requestInit } };
}

/** Ends the program, in time and with a verdict. */
export async function run(work) {
  const late = setTimeout(() => { console.error('it took too long'); process.exit(1); }, 120_000);
  await work();
  clearTimeout(late);
  console.log('all passed');
}
