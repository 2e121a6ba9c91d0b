# envd: list-windows
# Print the open windows with a title, the top one last, as `wmctrl -l -x` does: `0x00010203 0 program.Class - Title`.
Add-Type -TypeDefinition @'
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Runtime.InteropServices;
using System.Text;
using System.Text.RegularExpressions;

public static class EnvdWindows
{
    delegate bool Visit(IntPtr window, IntPtr argument);

    const int Cloaked = 14;

    [DllImport("user32.dll")]
    static extern bool EnumWindows(Visit visit, IntPtr argument);
    [DllImport("user32.dll")]
    static extern bool IsWindowVisible(IntPtr window);
    [DllImport("user32.dll")]
    static extern int GetWindowThreadProcessId(IntPtr window, out int process);
    [DllImport("user32.dll", CharSet = CharSet.Unicode)]
    static extern int GetWindowText(IntPtr window, StringBuilder text, int size);
    [DllImport("user32.dll", CharSet = CharSet.Unicode)]
    static extern int GetClassName(IntPtr window, StringBuilder name, int size);
    [DllImport("dwmapi.dll")]
    static extern int DwmGetWindowAttribute(IntPtr window, int attribute, out int value, int size);

    static string OneLine(StringBuilder text)
    {
        return Regex.Replace(text.ToString(), "[\\s\\x00-\\x1f]+", " ").Trim();
    }

    public static string[] List()
    {
        var lines = new List<string>();
        EnumWindows((window, argument) =>
        {
            int cloaked, process;
            // A suspended program's window is visible but cloaked.
            if (!IsWindowVisible(window)
                    || (DwmGetWindowAttribute(window, Cloaked, out cloaked, 4) == 0 && cloaked != 0))
                return true;
            var title = new StringBuilder(1024);
            var name = new StringBuilder(256);
            GetWindowText(window, title, title.Capacity);
            GetClassName(window, name, name.Capacity);
            GetWindowThreadProcessId(window, out process);
            if (OneLine(title) == "")
                return true;
            string program = "";
            try { program = Process.GetProcessById(process).ProcessName; } catch (ArgumentException) { }
            var kind = (program + "." + OneLine(name)).Replace(' ', '_');
            lines.Add(string.Format("0x{0:x8} 0 {1} - {2}", window.ToInt64(), kind, OneLine(title)));
            return true;
        }, IntPtr.Zero);
        lines.Reverse();
        return lines.ToArray();
    }
}
'@
[EnvdWindows]::List()
