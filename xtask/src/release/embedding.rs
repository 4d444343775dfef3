//! Checks what a VMM compiles that takes the engine with Cargo's default features.
//!
//! The numbers are promises of docs/embedding.md.

use std::collections::BTreeSet;

use crate::parts::Outcome;
use crate::process::{self, Result};
use crate::workspace::{root, target_directory};

/// The most crates of the engine's default graph, Sterna's own included.
const MOST_CRATES: usize = 45;
/// Build dependencies that compile C.
const C_COMPILERS: [&str; 4] = ["cc", "cmake", "bindgen", "pkg-config"];
/// Crates whose name ends in `-sys` and which contain no C: definitions of the kernel's interface.
const WITHOUT_C: [&str; 1] = ["linux-raw-sys"];
/// Crates that do the arithmetic of TLS. The feature `tls` alone must not choose one for the VMM.
const PROVIDERS: [&str; 2] = ["aws-lc-rs", "ring"];

/// Counts the crates, looks for C and for a provider of TLS, and runs the tests of `testing/embedder`.
pub fn check() -> Result<Outcome> {
    let normal = graph("normal", &[])?;
    let wrong = wrong_in(&normal, &graph("normal,build", &[])?, &graph("normal", &["--features", "tls"])?);
    if !wrong.is_empty() {
        return Err(wrong.join("; "));
    }
    println!("{} crates with default features, at most {MOST_CRATES}; no C", normal.len());
    for features in ["", "tls", "two-providers", "log"] {
        let mut command = process::cargo();
        command.args(["test", "--quiet"]).arg("--manifest-path");
        command.arg(root().join("testing/embedder/Cargo.toml"));
        command.args(["--features", features]).arg("--target-dir").arg(target_directory().join("embedder"));
        process::run(&mut command)?;
    }
    Ok(Outcome::Passed)
}

/// The names of the crates that the engine's library needs.
fn graph(edges: &str, more: &[&str]) -> Result<BTreeSet<String>> {
    let mut command = process::cargo();
    command.args(["tree", "--quiet", "--locked", "--package", "sterna", "--prefix", "none"]);
    command.args(["--target", "x86_64-unknown-linux-gnu", "--edges", edges]).args(more);
    Ok(names(&process::output(&mut command)?))
}

/// Name and version in each line of `cargo tree --prefix none`. A crate that is printed again has other marks.
fn names(tree: &str) -> BTreeSet<String> {
    let name = |line: &str| {
        let mut words = line.split_whitespace();
        Some(format!("{} {}", words.next()?, words.next()?))
    };
    tree.lines().filter_map(name).collect()
}

fn wrong_in(normal: &BTreeSet<String>, build: &BTreeSet<String>, tls: &BTreeSet<String>) -> Vec<String> {
    let of = |crates: &BTreeSet<String>, is_wrong: &dyn Fn(&str) -> bool| -> Vec<String> {
        let name = |each: &String| each.split(' ').next().unwrap_or_default().to_owned();
        crates.iter().map(name).filter(|name| is_wrong(name)).collect()
    };
    let mut wrong = Vec::new();
    if normal.len() > MOST_CRATES {
        wrong.push(format!("{} crates with default features, at most {MOST_CRATES}", normal.len()));
    }
    let compiles_c =
        |name: &str| C_COMPILERS.contains(&name) || name.ends_with("-sys") && !WITHOUT_C.contains(&name);
    let with_c = of(build, &compiles_c);
    wrong.extend(with_c.iter().map(|name| format!("{name} with default features: it needs a C compiler")));
    let chosen = of(tls, &|name| PROVIDERS.contains(&name));
    wrong.extend(chosen.iter().map(|name| format!("{name} with the feature tls: the VMM chooses it")));
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_count_a_crate_once_and_two_versions_twice() {
        let tree = "a v1.0.0 (/x/a)\nb v1.0.0\na v1.0.0 (/x/a) (*)\nb v2.0.0 (proc-macro)\n";
        assert_eq!(names(tree).len(), 3);
    }

    #[test]
    fn wrong_in_a_graph_is_c_a_provider_and_too_many_crates() {
        let of = |names: &[&str]| names.iter().map(|name| format!("{name} v1.0.0")).collect::<BTreeSet<_>>();
        let fine = of(&["linux-raw-sys", "rustls"]);
        assert!(wrong_in(&fine, &fine, &fine).is_empty());
        assert_eq!(wrong_in(&fine, &of(&["zstd-sys", "cc"]), &of(&["ring"])).len(), 3);
        let many: BTreeSet<String> = (0..=MOST_CRATES).map(|number| format!("c{number} v1.0.0")).collect();
        assert_eq!(wrong_in(&many, &fine, &fine).len(), 1);
    }
}
