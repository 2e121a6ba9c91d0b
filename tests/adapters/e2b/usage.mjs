// What the documentation of E2B's SDKs for JavaScript shows, against the server that E2B_API_URL names.
import assert from 'node:assert/strict'
import { CommandExitError, NotFoundError, Sandbox, TimeoutError } from 'e2b'
import { Sandbox as Desktop } from '@e2b/desktop'

const sandbox = await Sandbox.create({ timeoutMs: 60_000, metadata: { name: 'js' }, envs: { A: '1' } })
try {
  assert.equal((await sandbox.commands.run('echo $A')).stdout, '1\n')
  await assert.rejects(sandbox.commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
  await assert.rejects(sandbox.commands.run('sleep 60', { timeoutMs: 300 }), TimeoutError)
  let output = ''
  const cat = await sandbox.commands.run('cat', { background: true, stdin: true, onStdout: (data) => { output += data } })
  await sandbox.commands.sendStdin(cat.pid, 'abc')
  while (output !== 'abc') await new Promise((resolve) => setTimeout(resolve, 20))
  assert.equal((await sandbox.commands.list()).length, 1)
  assert.equal(await sandbox.commands.kill(cat.pid), true)
  const events = []
  const watch = await sandbox.files.watchDir('/home/user', (event) => events.push(event.type))
  await sandbox.files.write([{ path: 'a', data: '1' }, { path: 'b', data: new Uint8Array([0, 255]).buffer }])
  while (!events.includes('write')) await new Promise((resolve) => setTimeout(resolve, 20))
  await watch.stop()
  assert.equal(await sandbox.files.read('a'), '1')
  assert.deepEqual([...(await sandbox.files.read('b', { format: 'bytes' }))], [0, 255])
  await assert.rejects(sandbox.files.read('none'), NotFoundError)
  assert.equal(await (await fetch(await sandbox.downloadUrl('a'))).text(), '1')
  assert.equal(await sandbox.files.makeDir('d'), true)
  assert.equal(await sandbox.files.makeDir('d'), false)
  assert.deepEqual((await Sandbox.list({ query: { metadata: { name: 'js' } } }).nextItems()).map((each) => each.sandboxId), [sandbox.sandboxId])
  await sandbox.setTimeout(120_000)
  assert.equal(await sandbox.isRunning(), true)
  await sandbox.pause()
  assert.equal((await Sandbox.getInfo(sandbox.sandboxId)).state, 'paused')
  assert.equal(await (await Sandbox.connect(sandbox.sandboxId)).files.read('a'), '1')
} finally {
  await sandbox.kill()
}
assert.equal(await sandbox.isRunning(), false)

const desktop = await Desktop.create({ timeoutMs: 60_000 })
try {
  assert.deepEqual([...(await desktop.screenshot()).slice(1, 4)], [0x50, 0x4e, 0x47])
  await desktop.leftClick(379, 311)
  await desktop.write("it's JavaScript")
  await desktop.press(['ctrl', 's'])
  assert.equal(await desktop.files.read('note.txt'), "it's JavaScript")
  assert.deepEqual(await desktop.getCursorPosition(), { x: 379, y: 311 })
} finally {
  await desktop.kill()
}
console.log('done')
