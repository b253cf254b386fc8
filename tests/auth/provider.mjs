// A real OpenID provider on loopback, for tests/auth/provider.rs. It needs the package oidc-provider in the folder it is run from.
//
// It prints one line with its issuer and the address of its keys. Then each line on standard input is a request, answered by one line:
//   {"client": …, "resource": …, "scope": …}    an access token of that client for that resource
//   {"rotate": true}                            all keys are replaced
// It ends with its standard input.
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { generateKeyPairSync } from 'node:crypto';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

// The provider's own remarks do not belong among the answers.
console.info = console.warn = console.error;
const { Provider } = await import(pathToFileURL(createRequire(process.cwd() + '/').resolve('oidc-provider')));

const SCOPES = 'python:execute sessions:read packages:install admin';
const SECRET = 'only-for-this-test-on-loopback';
let generation = 0;

const server = createServer((request, response) => handle(request, response));
await new Promise((ready) => server.listen(0, '127.0.0.1', ready));
const issuer = `http://127.0.0.1:${server.address().port}`;
let handle = provider();
console.log(JSON.stringify({ issuer, jwks_uri: `${issuer}/jwks` }));

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  if (request.rotate) {
    handle = provider();
    console.log('{}');
  } else {
    console.log(JSON.stringify(await token(request)));
  }
}
process.exit(0);

function provider() {
  generation += 1;
  const keys = [
    key('rsa', { modulusLength: 2048 }, 'RS256'),
    key('ec', { namedCurve: 'P-256' }, 'ES256'),
  ];
  const client = (client_id) => ({
    client_id,
    client_secret: SECRET,
    grant_types: ['client_credentials'],
    redirect_uris: [],
    response_types: [],
  });
  return new Provider(issuer, {
    clients: [client('alice'), client('bob')],
    jwks: { keys },
    scopes: SCOPES.split(' '),
    features: {
      clientCredentials: { enabled: true },
      devInteractions: { enabled: false },
      resourceIndicators: {
        enabled: true,
        getResourceServerInfo: (_context, resource) => ({
          scope: SCOPES,
          audience: resource,
          accessTokenTTL: 600,
          accessTokenFormat: 'jwt',
          jwt: { sign: { alg: resource.endsWith('/elliptic') ? 'ES256' : 'RS256' } },
        }),
      },
    },
  }).callback();
}

function key(type, options, alg) {
  const { privateKey } = generateKeyPairSync(type, options);
  return { ...privateKey.export({ format: 'jwk' }), use: 'sig', alg, kid: `${type}-${generation}` };
}

async function token({ client, resource, scope }) {
  const answer = await fetch(`${issuer}/token`, {
    method: 'POST',
    headers: { authorization: `Basic ${Buffer.from(`${client}:${SECRET}`).toString('base64')}` },
    body: new URLSearchParams({ grant_type: 'client_credentials', resource, scope }),
  });
  return answer.json();
}
