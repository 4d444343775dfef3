//! The timed ways to call `sterna save` and `sterna restore` of a QEMU.

use std::path::Path;
use std::process::Command;

use crate::Failure;
use crate::group::skipped;
use sterna_benches::machines::Lab;

/// One way to call `sterna save`.
pub struct Tool {
    pub name: &'static str,
    pub arguments: Vec<String>,
    /// QEMU's rows that it is compared with.
    pub form: &'static str,
    /// Whether it is timed with every content.
    pub matters: bool,
    /// Whether this `sterna` has the command `restore`.
    pub can_restore: bool,
}

/// Forms of `sterna save` that are timed.
pub fn tools(lab: &Lab, place: &Path) -> Result<Vec<Tool>, Failure> {
    let xml = place.join("domain.xml");
    std::fs::write(&xml, "<domain type='kvm'><name>bench</name></domain>\n")
        .map_err(|error| format!("{}: {error}", xml.display()))?;
    let xml = xml.display().to_string();
    let knows = |command| {
        let asked = Command::new(&lab.sterna).args([command, "--help"]).output();
        let knows = asked.is_ok_and(|done| done.status.success());
        if !knows {
            skipped(&format!("sterna {command} of QEMU"), &format!("this sterna has no command `{command}`"));
        }
        knows
    };
    let (can_save, can_restore) = (knows("save"), knows("restore"));
    if !can_save {
        return Ok(Vec::new());
    }
    let tool = |name, form, matters, arguments: &[&str]| Tool {
        name,
        form,
        matters,
        can_restore,
        arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
    };
    Ok(vec![
        tool("legacy", "legacy", true, &["--format", "legacy"]),
        tool("mapped-ram, direct", "mapped-ram", true, &["--format", "mapped-ram", "--direct-io"]),
        tool("mapped-ram, buffered", "mapped-ram", false, &["--format", "mapped-ram", "--no-direct-io"]),
        tool("libvirt raw", "", false, &["--format", "libvirt-raw", "--xml", &xml]),
        tool("libvirt sparse", "", false, &["--format", "libvirt-sparse", "--xml", &xml]),
        tool("libvirt zstd", "", false, &["--format", "libvirt-zstd", "--xml", &xml]),
    ])
}
