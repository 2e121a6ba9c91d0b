# envd: accessibility-tree
# Print the elements of all windows as XML, in the form and with the roles of Linux guests. Given: $limit, $seconds.
# A tree that is not complete has `truncated="true"` at its root: the limit of elements or of time was reached, or a
# window did not answer.
Add-Type -AssemblyName 'UIAutomationClient', 'UIAutomationTypes'
Add-Type -Namespace Envd -Name User32 -MemberDefinition @'
[DllImport("user32.dll")] public static extern bool SetProcessDPIAware();
[DllImport("user32.dll")] public static extern IntPtr GetForegroundWindow();
[DllImport("user32.dll")] public static extern IntPtr GetAncestor(IntPtr window, int kind);
'@
# Boxes are in pixels of the screen also where Windows scales.
[void][Envd.User32]::SetProcessDPIAware()

$roles = @{
  Button = 'push-button'; Calendar = 'calendar'; CheckBox = 'check-box'; ComboBox = 'combo-box'; Custom = 'panel'
  DataGrid = 'table'; DataItem = 'table-cell'; Document = 'document-text'; Edit = 'text'; Group = 'panel'
  Header = 'header'; HeaderItem = 'table-column-header'; Hyperlink = 'link'; Image = 'image'; List = 'list'
  ListItem = 'list-item'; Menu = 'menu'; MenuBar = 'menu-bar'; MenuItem = 'menu-item'; Pane = 'panel'
  ProgressBar = 'progress-bar'; RadioButton = 'radio-button'; ScrollBar = 'scroll-bar'; SemanticZoom = 'panel'
  Separator = 'separator'; Slider = 'slider'; Spinner = 'spin-button'; SplitButton = 'push-button-menu'
  StatusBar = 'status-bar'; Tab = 'page-tab-list'; TabItem = 'page-tab'; Table = 'table'; Text = 'label'
  Thumb = 'thumb'; TitleBar = 'title-bar'; ToolBar = 'tool-bar'; ToolTip = 'tool-tip'; Tree = 'tree'
  TreeItem = 'tree-item'; Window = 'frame'
}
$element = [Windows.Automation.AutomationElement]
$value = [Windows.Automation.ValuePattern]
$request = [Windows.Automation.CacheRequest]::new()
$request.TreeScope = 'Subtree'
$request.TreeFilter = [Windows.Automation.Automation]::ControlViewCondition
foreach ($property in $element::NameProperty, $element::ControlTypeProperty, $element::BoundingRectangleProperty,
    $element::IsEnabledProperty, $element::IsOffscreenProperty, $element::IsPasswordProperty,
    $element::HasKeyboardFocusProperty, $element::NativeWindowHandleProperty, $value::ValueProperty, $value::IsReadOnlyProperty,
    [Windows.Automation.RangeValuePattern]::ValueProperty,
    [Windows.Automation.TogglePattern]::ToggleStateProperty,
    [Windows.Automation.SelectionItemPattern]::IsSelectedProperty,
    [Windows.Automation.ExpandCollapsePattern]::ExpandCollapseStateProperty) {
  $request.Add($property)
}

$space = 'https://accessibility.ubuntu.example.org/ns/'
$state = @{ left = [int]$limit; clock = [Diagnostics.Stopwatch]::StartNew(); truncated = $false }
$xml = [Xml.XmlDocument]::new()
$root = $xml.AppendChild($xml.CreateElement('desktop-frame'))

function Get-Cached($node, $property) {
  $found = $node.GetCachedPropertyValue($property, $true)
  if (-not [object]::ReferenceEquals($found, $element::NotSupported)) { $found }
}

function Get-Clean($text) {
  # XML has no such characters.
  "$text" -replace '[^\t\n\r\u0020-\uD7FF\uE000-\uFFFD]', ''
}

function Get-Value($node, $type) {
  if ($node.Cached.IsPassword) { return '' }
  $found = Get-Cached $node ($value::ValueProperty)
  if ($null -eq $found) { $found = Get-Cached $node ([Windows.Automation.RangeValuePattern]::ValueProperty) }
  $pattern = $null
  if ($null -eq $found -and $type -in 'Document', 'Edit' -and
      $node.TryGetCurrentPattern([Windows.Automation.TextPattern]::Pattern, [ref]$pattern)) {
    $found = $pattern.DocumentRange.GetText(1000)
  }
  $found = Get-Clean $found
  $found.Substring(0, [Math]::Min(1000, $found.Length))
}

function Add-Node($parent, $node) {
  if ($state.left -le 0 -or $state.clock.Elapsed.TotalSeconds -gt [int]$seconds) {
    $state.truncated = $true
    return
  }
  $state.left--
  $type = $node.Cached.ControlType.ProgrammaticName -replace '^ControlType\.', ''
  $role = if ($node.Cached.IsPassword) { 'password-text' } elseif ($roles[$type]) { $roles[$type] } else { 'unknown' }
  # A dialog belongs to the window of its program; in Linux guests it is a window of its own.
  if ($type -eq 'Window') { $parent = $root }
  $item = $parent.AppendChild($xml.CreateElement($role))
  $item.SetAttribute('name', (Get-Clean $node.Cached.Name))
  $toggle = Get-Cached $node ([Windows.Automation.TogglePattern]::ToggleStateProperty)
  $expansion = Get-Cached $node ([Windows.Automation.ExpandCollapsePattern]::ExpandCollapseStateProperty)
  $states = @{
    active = $front -ne 0 -and $node.Cached.NativeWindowHandle -eq $front
    enabled = $node.Cached.IsEnabled
    focused = $node.Cached.HasKeyboardFocus
    checked = "$toggle" -eq 'On'
    indeterminate = "$toggle" -eq 'Indeterminate'
    expanded = "$expansion" -eq 'Expanded'
    selected = (Get-Cached $node ([Windows.Automation.SelectionItemPattern]::IsSelectedProperty)) -eq $true
    editable = $type -in 'Document', 'Edit' -and (Get-Cached $node ($value::IsReadOnlyProperty)) -ne $true
  }
  foreach ($entry in $states.GetEnumerator()) {
    if ($entry.Value) { [void]$item.SetAttribute($entry.Key, "${space}state", 'true') }
  }
  $box = $node.Cached.BoundingRectangle
  if (-not ($box.IsEmpty -or $node.Cached.IsOffscreen)) {
    [void]$item.SetAttribute('screencoord', "${space}component", "($([int]$box.X), $([int]$box.Y))")
    [void]$item.SetAttribute('size', "${space}component", "($([int]$box.Width), $([int]$box.Height))")
  }
  $content = Get-Value $node $type
  if ($content) { [void]$item.AppendChild($xml.CreateTextNode($content)) }
  # Reading the property fails for an element without children.
  $children = @()
  try { $children = $node.CachedChildren } catch { $children = @() }
  foreach ($child in $children) { Add-Node $item $child }
}

$foreground = [Envd.User32]::GetForegroundWindow()
$front = $foreground.ToInt64()
$owner = [Envd.User32]::GetAncestor($foreground, 3).ToInt64()
$windows = @($element::RootElement.FindAll('Children', [Windows.Automation.Condition]::TrueCondition))
# The program in use first, in case time runs out.
foreach ($is_in_use in $true, $false) {
  foreach ($window in $windows) {
    try {
      if (($window.Current.NativeWindowHandle -eq $owner) -ne $is_in_use) { continue }
      Add-Node $root ($window.GetUpdatedCache($request))
    } catch {
      # The window has closed or hangs.
      $state.truncated = $true
    }
  }
}
if ($state.truncated) { $root.SetAttribute('truncated', 'true') }
$xml.OuterXml
