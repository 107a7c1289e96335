// A Chromium without a window, spoken to through pipes by its DevTools protocol.
import { spawn } from 'node:child_process';

const ARGUMENTS = ['--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', '--remote-debugging-pipe',
  '--window-size=1000,900', 'about:blank'];

const MARGIN = 16;

export async function openBrowser(program) {
  const process = spawn(program, ARGUMENTS, { stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe'] });
  const send = messages(process);
  const { targetInfos } = await send('Target.getTargets');
  const { targetId } = targetInfos.find(({ type }) => type === 'page');
  const { sessionId } = await send('Target.attachToTarget', { targetId, flatten: true });
  const tab = new Tab((method, parameters) => send(method, parameters, sessionId));
  await tab.send('Page.enable');
  // Without its pipes the browser ends, too.
  const close = async () => {
    await Promise.race([send('Browser.close'), new Promise((done) => setTimeout(done, 5000))]).catch(() => {});
    process.stdio.forEach((pipe) => pipe?.destroy());
    process.unref();
  };
  return { tab, close };
}

// A function that sends a message and waits for its answer. Messages are JSON; a zero byte ends each.
function messages(process) {
  const [, , , input, output] = process.stdio;
  const waiting = new Map();
  const fail = (error) => {
    waiting.forEach(({ reject }) => reject(error));
    waiting.clear();
  };
  process.on('error', fail);
  process.on('exit', (code) => fail(new Error(`the browser has ended, ${code}`)));
  input.on('error', fail);
  let text = '';
  output.setEncoding('utf8').on('data', (part) => {
    const parts = (text + part).split('\0');
    text = parts.pop();
    for (const { id, result, error } of parts.map(JSON.parse)) {
      const { resolve, reject } = waiting.get(id) ?? {};
      waiting.delete(id);
      if (error) reject?.(new Error(error.message));
      else resolve?.(result);
    }
  });
  let last = 0;
  return (method, params = {}, sessionId = undefined) => new Promise((resolve, reject) => {
    last += 1;
    waiting.set(last, { resolve, reject });
    input.write(`${JSON.stringify({ id: last, method, params, sessionId })}\0`);
  });
}

class Tab {
  constructor(send) {
    this.send = send;
  }

  open(url) {
    return this.send('Page.navigate', { url });
  }

  // The value of an expression in the page.
  async evaluate(expression) {
    const { result, exceptionDetails } = await this.send('Runtime.evaluate', { expression, returnByValue: true });
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
    return result.value;
  }

  // A PNG of an element, with a margin.
  async picture(element) {
    const { x, y, width, height } = await this.evaluate(`document.querySelector('${element}').getBoundingClientRect().toJSON()`);
    const { data } = await this.send('Page.captureScreenshot', {
      captureBeyondViewport: true,
      clip: { x: x - MARGIN, y: y - MARGIN, width: width + 2 * MARGIN, height: height + 2 * MARGIN, scale: 1 },
    });
    return Buffer.from(data, 'base64');
  }
}
