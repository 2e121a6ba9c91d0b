# envd: in-session
# Run a script in the session of the user who is logged in, and print its output. Given: $inner, $wait_s.
# It reads the first line of standard input as $request.
# The guest agent is a service: its own session has no desktop. A process inherits no handles from another session, so
# the output comes back through a named pipe.
Add-Type -TypeDefinition @'
using System;
using System.ComponentModel;
using System.Runtime.InteropServices;
using System.Text;

public static class EnvdSession
{
    [StructLayout(LayoutKind.Sequential, CharSet = CharSet.Unicode)]
    struct StartupInfo
    {
        public int Size;
        public string Reserved, Desktop, Title;
        public int X, Y, Width, Height, Columns, Rows, Fill, Flags;
        public short Show, Reserved2Size;
        public IntPtr Reserved2, Input, Output, Error;
    }

    [StructLayout(LayoutKind.Sequential)]
    struct ProcessInformation
    {
        public IntPtr Process, Thread;
        public int ProcessId, ThreadId;
    }

    const int CreateUnicodeEnvironment = 0x400, CreateNoWindow = 0x08000000;

    [DllImport("kernel32.dll")]
    static extern int WTSGetActiveConsoleSessionId();
    [DllImport("wtsapi32.dll", SetLastError = true)]
    static extern bool WTSQueryUserToken(int session, out IntPtr token);
    [DllImport("userenv.dll", SetLastError = true)]
    static extern bool CreateEnvironmentBlock(out IntPtr environment, IntPtr token, bool inherit);
    [DllImport("advapi32.dll", SetLastError = true, CharSet = CharSet.Unicode)]
    static extern bool CreateProcessAsUser(
        IntPtr token, string program, StringBuilder command, IntPtr processSecurity, IntPtr threadSecurity, bool inherit,
        int flags, IntPtr environment, string directory, ref StartupInfo startup, out ProcessInformation started);

    // The handles end with this process.
    public static int Start(string command)
    {
        IntPtr token, environment;
        if (!WTSQueryUserToken(WTSGetActiveConsoleSessionId(), out token))
            throw new Win32Exception(Marshal.GetLastWin32Error(), "no user is logged in");
        if (!CreateEnvironmentBlock(out environment, token, false))
            throw new Win32Exception();
        var startup = new StartupInfo { Size = Marshal.SizeOf(typeof(StartupInfo)), Desktop = "winsta0\\default" };
        ProcessInformation started;
        if (!CreateProcessAsUser(token, null, new StringBuilder(command), IntPtr.Zero, IntPtr.Zero, false,
                CreateUnicodeEnvironment | CreateNoWindow, environment, null, ref startup, out started))
            throw new Win32Exception();
        return started.ProcessId;
    }
}
'@

$name = 'envd-' + [Guid]::NewGuid().ToString('N')
$security = [IO.Pipes.PipeSecurity]::new()
foreach ($sid in 'S-1-5-18', 'S-1-5-4') {
  # The system, and users who are logged in.
  $who = [Security.Principal.SecurityIdentifier]::new($sid)
  $security.AddAccessRule([IO.Pipes.PipeAccessRule]::new($who, 'ReadWrite', 'Allow'))
}
$pipe = [IO.Pipes.NamedPipeServerStream]::new($name, 'InOut', 1, 'Byte', 'Asynchronous', 0, 0, $security)
$program = "`$name = '$name'`n`$body = {`n$inner`n}`n" + @'
$pipe = [IO.Pipes.NamedPipeClientStream]::new('.', $name, 'InOut')
$pipe.Connect(10000)
$request = [IO.StreamReader]::new($pipe).ReadLine()
$writer = [IO.StreamWriter]::new($pipe)
try { $writer.Write('+' + ((& $body) -join "`n")) } catch { $writer.Write('-' + $_) }
$writer.Dispose()
'@
$encoded = [Convert]::ToBase64String([Text.Encoding]::Unicode.GetBytes($program))
$id = [EnvdSession]::Start("$PSHOME\powershell.exe -NoProfile -NonInteractive -EncodedCommand $encoded")
if (-not $pipe.WaitForConnectionAsync().Wait(20000)) { throw 'PowerShell did not start in the session of the user' }
$sent = [Text.Encoding]::UTF8.GetBytes((@($input) -join '') + "`n")
if (-not $pipe.WriteAsync($sent, 0, $sent.Length).Wait(20000)) { throw 'the script did not read its input' }
$reply = [IO.StreamReader]::new($pipe).ReadToEndAsync()
if (-not $reply.Wait(1000 * $wait_s)) {
  Stop-Process -Id $id -Force
  throw 'the script did not end in the session of the user'
}
$text = $reply.Result
if (-not $text.StartsWith('+')) { throw "in the session of the user: $($text.TrimStart('-'))" }
[Console]::Out.Write($text.Substring(1))
