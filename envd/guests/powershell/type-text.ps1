# envd: type-text
# Type a text into the window that has the focus, whatever the keyboard's layout. Given: $text.
Add-Type -TypeDefinition @'
using System.ComponentModel;
using System.Runtime.InteropServices;

public static class EnvdKeyboard
{
    // INPUT of 64-bit Windows with its KEYBDINPUT; the largest part of the union is MOUSEINPUT.
    [StructLayout(LayoutKind.Explicit, Size = 40)]
    struct Input
    {
        [FieldOffset(0)] public int Type;
        [FieldOffset(8)] public ushort Key;
        [FieldOffset(10)] public ushort Scan;
        [FieldOffset(12)] public int Flags;
    }

    const int Keyboard = 1, KeyUp = 2, Unicode = 4;

    [DllImport("user32.dll", SetLastError = true)]
    static extern int SendInput(int count, Input[] inputs, int size);

    public static void Type(string text)
    {
        foreach (char unit in text)
        {
            var press = new Input { Type = Keyboard, Scan = unit, Flags = Unicode };
            // Programs expect these as keys.
            if (unit == '\n') press = new Input { Type = Keyboard, Key = 0x0d, Scan = 0x1c };
            if (unit == '\t') press = new Input { Type = Keyboard, Key = 0x09, Scan = 0x0f };
            var release = press;
            release.Flags |= KeyUp;
            if (SendInput(2, new[] { press, release }, Marshal.SizeOf(typeof(Input))) != 2)
                throw new Win32Exception();
        }
    }
}
'@
[EnvdKeyboard]::Type($text)
