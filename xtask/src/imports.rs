//! Checks that imports inside a crate form no circle, so that a reader needs only a module and its
//! imports.
//!
//! The check reads the modules' text: `use` declarations and paths that begin with `crate::` or
//! `super::`. Tests and documentation do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::parts::Outcome;
use crate::process::Result;

/// Folders of the crates that must have no circles.
const CRATES: &[&str] = &[
    "crates/sterna",
    "crates/sterna-arbiter",
    "crates/sterna-capi",
    "crates/sterna-cli",
    "crates/sterna-devices",
    "crates/sterna-disk",
    "crates/sterna-drive",
    "crates/sterna-forecast",
    "crates/sterna-image",
    "crates/sterna-libvirt",
    "crates/sterna-opaque",
    "crates/sterna-pager",
    "crates/sterna-proto",
    "crates/sterna-qmp",
    "crates/sterna-ram",
    "crates/sterna-relay",
    "crates/sterna-s3",
    "crates/sterna-standby",
    "crates/sterna-store",
    "crates/sterna-transport",
    "crates/sterna-vmm",
    "crates/sterna-wire",
];

/// A module's path inside its crate; empty for the crate itself.
type Module = Vec<String>;

/// Fails with the modules of every circle.
pub fn check() -> Result<Outcome> {
    let mut wrong = Vec::new();
    for folder in CRATES {
        let modules = read(Path::new(folder)).map_err(|error| format!("{folder}: {error}"))?;
        for circle in circles(&modules) {
            let names: Vec<String> = circle.iter().map(|module| module.join("::")).collect();
            wrong.push(format!(
                "{folder}: these modules import each other in a circle: {}. Move what they share into a module of its own",
                names.join(", ")
            ));
        }
    }
    if wrong.is_empty() { Ok(Outcome::Passed) } else { Err(wrong.join("; ")) }
}

/// The text of each module of a crate.
fn read(folder: &Path) -> std::io::Result<BTreeMap<Module, String>> {
    let (source, mut modules, mut folders) = (folder.join("src"), BTreeMap::new(), vec![Module::new()]);
    while let Some(at) = folders.pop() {
        for entry in std::fs::read_dir(at.iter().fold(source.clone(), |path, part| path.join(part)))? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let mut module = at.clone();
            if entry.file_type()?.is_dir() {
                module.push(name);
                folders.push(module);
            } else if let Some(stem) = name.strip_suffix(".rs") {
                if !matches!(stem, "mod" | "lib" | "main") {
                    module.push(stem.to_owned());
                }
                if module.iter().all(|part| part != "tests") {
                    modules.insert(module, std::fs::read_to_string(entry.path())?);
                }
            }
        }
    }
    Ok(modules)
}

/// Sets of modules that import each other, directly or through other modules.
fn circles(modules: &BTreeMap<Module, String>) -> Vec<Vec<Module>> {
    let imports: BTreeMap<&Module, BTreeSet<Module>> =
        modules.iter().map(|(module, text)| (module, imports_of(module, text, modules))).collect();
    let reached: BTreeMap<&Module, BTreeSet<Module>> =
        modules.keys().map(|module| (module, reach(module, &imports))).collect();
    let mut found: Vec<Vec<Module>> = Vec::new();
    for (module, reaches) in &reached {
        if reaches.contains(*module) && !found.iter().any(|circle| circle.contains(module)) {
            let both = |other: &&Module| reached[*other].contains(*module);
            found.push(reaches.iter().filter(both).cloned().collect());
        }
    }
    found
}

/// All modules that `from` imports, directly or through other modules.
fn reach(from: &Module, imports: &BTreeMap<&Module, BTreeSet<Module>>) -> BTreeSet<Module> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![from.clone()]);
    while let Some(module) = open.pop() {
        for next in &imports[&module] {
            if reached.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    reached
}

fn imports_of(module: &Module, text: &str, modules: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let code = code(text);
    let mut paths: Vec<String> = Vec::new();
    for (_, declaration) in after(&code, "use ") {
        paths.extend(expand(declaration.split(';').next().unwrap_or_default()));
    }
    for start in ["crate::", "super::"] {
        paths.extend(after(&code, start).map(|(_, rest)| {
            let end =
                rest.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(rest.len());
            format!("{start}{}", &rest[..end])
        }));
    }
    // The head of a `use` tree with braces: `expand` has its whole paths.
    paths.retain(|path| !path.ends_with("::"));
    paths.iter().filter_map(|path| resolve(module, path, modules)).filter(|found| found != module).collect()
}

/// The text without comments, unit tests and the paths in `pub(in …)`.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let mut code = lines.collect::<Vec<_>>().join(" ");
    while let Some(at) = code.find("pub(in ") {
        let end = code[at..].find(')').map_or(code.len(), |end| at + end + 1);
        code.replace_range(at..end, "pub");
    }
    inline_modules_as_their_file(&mut code);
    code
}

/// In a module inside the file, `super` is the file itself.
fn inline_modules_as_their_file(code: &mut String) {
    let begins: Vec<usize> = after(code, "mod ").map(|(at, _)| at).collect();
    // The last module first, so that places before it stay valid.
    for at in begins.into_iter().rev() {
        let is_inline = code[at..].find(['{', ';']).filter(|end| code[at + end..].starts_with('{'));
        let Some(open) = is_inline.map(|end| at + end) else { continue };
        let mut depth = 0;
        let close = code[open..].find(|c: char| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            depth == 0
        });
        let body = open..close.map_or(code.len(), |length| open + length);
        const OUTER: &str = "super::super::";
        let parts: Vec<String> =
            code[body.clone()].split(OUTER).map(|part| part.replace("super::", "self::")).collect();
        code.replace_range(body, &parts.join("super::"));
    }
}

/// Each place where `word` occurs as a separate word, with the text after it.
fn after<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = (usize, &'a str)> {
    text.match_indices(word).filter_map(move |(at, _)| {
        let is_word = !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
        is_word.then(|| (at, &text[at + word.len()..]))
    })
}

/// The paths of a `use` tree.
fn expand(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some((head, rest)) = tree.split_once('{') else {
        return vec![tree.split(" as ").next().unwrap_or_default().trim().to_owned()];
    };
    let body = rest.rsplit_once('}').map_or(rest, |(body, _)| body);
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in body.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        match parts.last_mut() {
            Some(part) if c != ',' || depth > 0 => part.push(c),
            _ => parts.push(String::new()),
        }
    }
    let parts = parts.iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(|part| expand(&format!("{}{}", head.trim(), part.trim()))).collect()
}

/// The innermost module that a path names; `None` if it leads out of the crate.
fn resolve(module: &Module, path: &str, modules: &BTreeMap<Module, String>) -> Option<Module> {
    let mut parts: Vec<&str> = path.split("::").map(str::trim).filter(|part| !part.is_empty()).collect();
    let mut at = match *parts.first()? {
        "crate" => Module::new(),
        "super" | "self" => module.clone(),
        child => {
            let inside = [module.as_slice(), &[child.to_owned()]].concat();
            return modules.contains_key(&inside).then(|| descend(module.clone(), &parts, modules));
        }
    };
    if parts[0] == "crate" {
        parts.remove(0);
    }
    while let Some(part @ ("super" | "self")) = parts.first().copied() {
        if part == "super" {
            at.pop()?;
        }
        parts.remove(0);
    }
    Some(descend(at, &parts, modules))
}

fn descend(mut at: Module, parts: &[&str], modules: &BTreeMap<Module, String>) -> Module {
    for part in parts {
        let inside = [at.as_slice(), &[(*part).to_owned()]].concat();
        if !modules.contains_key(&inside) {
            break;
        }
        at = inside;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(texts: &[(&str, &str)]) -> Vec<Vec<Module>> {
        let path = |name: &str| name.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
        circles(&texts.iter().map(|(name, text)| (path(name), (*text).to_owned())).collect())
    }

    #[test]
    fn modules_that_import_each_other_are_a_circle() {
        let circles = found(&[
            ("", "mod a;\nmod b;\npub use a::A;"),
            ("a", "mod inner;"),
            ("a::inner", "use std::fmt;\nfn f() -> super::super::b::B {}"),
            ("b", "mod c;\nuse c::C;\npub struct B;"),
            ("b::c", "use crate::{d::D, a::inner::{X, Y as Z}};"),
            ("d", "use serde::{Serialize, a::B};"),
            ("e", "mod deep;\nmod inline {\n    use super::F;\n    fn f() { super::g(); }\n}\nfn h() {}"),
            ("e::deep", "use super::super::e::F;"),
        ]);

        let names: Vec<Vec<String>> =
            circles.iter().map(|circle| circle.iter().map(|module| module.join("::")).collect()).collect();
        assert_eq!(names, [["a::inner", "b", "b::c"]]);
    }

    #[test]
    fn re_exports_of_a_child_are_imports_of_its_parent() {
        let around = [
            ("", "mod a;"),
            ("a", "mod child;\nmod shared;\npub use child::Child;\npub use shared::Shared;"),
            ("a::child", "use super::Shared;"),
            ("a::shared", "pub struct Shared;"),
        ];
        let mut below = around;
        below[2].1 = "use super::shared::Shared;";

        let names: Vec<Vec<String>> = found(&around)[0].to_vec();
        assert_eq!(names, [vec!["a"], vec!["a", "child"]]);
        assert!(found(&below).is_empty());
    }

    #[test]
    fn braces_of_several_modules_import_these_modules_and_not_their_parent() {
        let siblings = [
            ("", "mod a;"),
            ("a", "mod left;\nmod right;\nuse left::Left;"),
            ("a::left", "use super::{right::Right};"),
            ("a::right", "pub struct Right;"),
        ];

        assert!(found(&siblings).is_empty());
    }

    #[test]
    fn every_crate_is_checked() {
        let folders = std::fs::read_dir(crate::workspace::root().join("crates")).unwrap();
        let mut crates: Vec<String> = folders
            .map(|folder| format!("crates/{}", folder.unwrap().file_name().to_string_lossy()))
            .collect();
        crates.sort();

        assert_eq!(CRATES, crates);
    }

    #[test]
    fn what_tests_comments_and_visibility_name_is_no_import() {
        let none = [
            ("", "mod a;\nmod b;"),
            ("a", "// use crate::b;\npub(in crate::b) fn f() {}\n#[cfg(test)]\nmod tests { use crate::b; }"),
            ("b", "use crate::a;"),
        ];

        assert!(found(&none).is_empty());
    }
}
