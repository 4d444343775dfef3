//! Kernel modules out of an unpacked package, with those that they need, in the order of loading.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::scenarios::Failure;

/// The modules' files and, before each, those it depends on. What the package lacks is built in.
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

/// The names after `depends=` in the module's information.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = module[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(value).split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
