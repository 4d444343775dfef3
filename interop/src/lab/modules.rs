//! Reads kernel modules from an unpacked package, with their dependencies, in loading order.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::scenarios::Failure;

/// The modules' files, each after its dependencies. A module that is not in the package is built into the
/// kernel.
pub(super) fn with_dependencies(root: &Path, names: &[&str]) -> Result<Vec<Vec<u8>>, Failure> {
    let mut files = BTreeMap::new();
    list(&root.join("lib/modules"), &mut files);
    let (mut seen, mut order) = (Vec::new(), Vec::new());
    for name in names {
        visit(&files, name, &mut seen, &mut order)?;
    }
    if order.is_empty() {
        return Err(format!("the kernel's package has none of the modules {}", names.join(", ")));
    }
    Ok(order)
}

fn visit(
    files: &BTreeMap<String, PathBuf>,
    name: &str,
    seen: &mut Vec<String>,
    order: &mut Vec<Vec<u8>>,
) -> Result<(), Failure> {
    let name = name.replace('-', "_");
    let Some(path) = files.get(&name).filter(|_| !seen.contains(&name)) else { return Ok(()) };
    seen.push(name);
    let module = content(path)?;
    for dependency in dependencies(&module) {
        visit(files, &dependency, seen, order)?;
    }
    order.push(module);
    Ok(())
}

fn list(directory: &Path, files: &mut BTreeMap<String, PathBuf>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if path.is_dir() && !path.is_symlink() {
            list(&path, files);
        } else if let Some((stem, _)) = name.split_once(".ko") {
            files.insert(stem.replace('-', "_"), path);
        }
    }
}

fn content(path: &Path) -> Result<Vec<u8>, Failure> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return super::read(path);
    }
    let output = Command::new("xz").arg("-dc").arg(path).output().map_err(|error| format!("xz: {error}"))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(format!("xz cannot read {}", path.display()))
    }
}

/// Parameters with which a module is loaded here.
pub(super) fn parameters(module: &[u8]) -> &'static CStr {
    match information(module, b"\0name=").as_deref() {
        // The module then logs the reset of the VM and does not perform it.
        Some("softdog") => c"soft_noboot=1",
        _ => c"",
    }
}

/// The names after `depends=` in the module's information.
fn dependencies(module: &[u8]) -> Vec<String> {
    let names = information(module, b"\0depends=").unwrap_or_default();
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn information(module: &[u8], key: &[u8]) -> Option<String> {
    let at = module.windows(key.len()).position(|window| window == key)?;
    let value = module[at + key.len()..].split(|byte| *byte == 0).next()?;
    Some(String::from_utf8_lossy(value).into_owned())
}
