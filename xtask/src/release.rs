//! `cargo xtask release-check`: checks that must pass before crates are published. It is separate
//! from the tests, because it installs tools and another toolchain, and takes long.

mod api;
mod embedding;
mod manifests;
mod mutants;
mod semver;
pub mod tools;

use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::workspace::{Metadata, target_directory};

const PARTS: [&str; 10] =
    ["manifests", "package", "msrv", "features", "embedding", "docs", "api", "semver", "deny", "mutants"];
/// Features that choose the library of TLS.
const TLS_LIBRARIES: [&str; 2] = ["aws-lc-rs", "ring"];
/// Text that cargo-deny prints when it has no network.
const NO_NETWORK: &str = "failed to fetch advisory database";

/// Runs all parts or the named ones, or stores the interfaces.
///
/// `cargo xtask release-check [--since REVISION] [--mutants-minutes N] [--update-api | PART…]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let (since, arguments) = option(arguments, "--since")?;
    let (minutes, arguments) = option(&arguments, "--mutants-minutes")?;
    let minutes = minutes.map(|minutes| {
        minutes
            .parse()
            .map_err(|_| Failure::Usage(format!("--mutants-minutes takes a number, not `{minutes}`")))
    });
    let minutes = minutes.transpose()?.unwrap_or(mutants::MINUTES);
    let arguments = &arguments[..];
    match arguments {
        [word] if word == "--list" => {
            println!("{}", PARTS.join("\n"));
            return Ok(());
        }
        [word] if word == "--update-api" => return Ok(api::update(&published()?)?),
        _ => {}
    }
    if let Some(unknown) = arguments.iter().find(|name| !PARTS.contains(&name.as_str())) {
        return Err(Failure::Usage(format!("there is no part `{unknown}`; there are {}", PARTS.join(", "))));
    }
    let crates = published()?;
    let names: Vec<String> = crates.iter().map(|package| package.name.clone()).collect();
    let mut parts = Parts::only(arguments);
    parts.part("manifests", || manifests::check(&crates));
    parts.part("package", || package(&crates, &names));
    parts.part("msrv", || msrv(&crates));
    parts.part("features", || features(&crates));
    parts.part("embedding", embedding::check);
    parts.part("docs", || docs(&names));
    parts.part("api", || api::check(&crates));
    parts.part("semver", || semver::check(&crates, since.as_deref()));
    parts.part("deny", deny);
    parts.part("mutants", || mutants::check(minutes));
    parts.finish()
}

/// The value of an option, and the other arguments.
fn option(arguments: &[String], name: &str) -> std::result::Result<(Option<String>, Vec<String>), Failure> {
    let mut others = arguments.to_vec();
    let Some(at) = others.iter().position(|argument| argument == name) else { return Ok((None, others)) };
    if at + 1 == others.len() {
        return Err(Failure::Usage(format!("{name} needs a value")));
    }
    let value = others.drain(at..at + 2).nth(1);
    Ok((value, others))
}

/// A crate that is published on crates.io.
pub struct Published {
    /// The name of the crate.
    pub name: String,
    /// The package in cargo's metadata.
    pub package: Value,
}

impl Published {
    /// The features of the crate, without `default`.
    fn features(&self) -> Vec<String> {
        let features = self.package["features"].as_object();
        features.into_iter().flat_map(|map| map.keys()).filter(|name| *name != "default").cloned().collect()
    }
}

impl Published {
    /// Whether no feature switches TLS off, so that each set of features needs a library for it.
    fn always_speaks_tls(&self) -> bool {
        let uses = self.package["dependencies"].as_array().into_iter().flatten();
        uses.filter(|used| used["name"] == "rustls").any(|used| used["optional"] == false)
    }
}

/// Every member of the workspace whose `publish` permits it. Each crate follows the crates that it
/// uses.
fn published() -> Result<Vec<Published>> {
    let metadata = Metadata::of_members(None)?;
    let mut left: Vec<Published> = metadata
        .packages()
        // `publish = false` is an empty list of registries.
        .filter(|package| package["publish"].is_null())
        .map(|package| Published {
            name: package["name"].as_str().unwrap_or_default().to_owned(),
            package: package.clone(),
        })
        .collect();
    let mut sorted: Vec<Published> = Vec::new();
    while !left.is_empty() {
        let is_ready = |package: &Published| {
            let uses = package.package["dependencies"].as_array().into_iter().flatten();
            let mut uses = uses.filter(|used| used["kind"] != "dev").filter_map(|used| used["name"].as_str());
            !uses.any(|used| left.iter().any(|other| other.name == used))
        };
        let at = left.iter().position(is_ready).ok_or("the crates use each other in a circle")?;
        sorted.push(left.remove(at));
    }
    Ok(sorted)
}

/// Packs each crate, unpacks it elsewhere and builds it from the packages alone.
fn package(crates: &[Published], names: &[String]) -> Result<Outcome> {
    // A separate directory, because cargo does not recompile sources of the same name and version.
    let target = target_directory().join("release-package");
    match std::fs::remove_dir_all(&target) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(format!("cannot remove {}: {error}", target.display()));
        }
        _ => forget_unpacked(crates)?,
    }
    let mut command = process::cargo();
    command.args(["package", "--quiet", "--allow-dirty", "--locked"]);
    select(&mut command, names);
    command.arg("--target-dir").arg(target);
    process::run(&mut command)?;
    Ok(Outcome::Passed)
}

/// Removes the packages that an earlier run has unpacked.
///
/// Cargo does not unpack the same name and version again.
fn forget_unpacked(crates: &[Published]) -> Result<()> {
    let of_user = || std::env::home_dir().map(|home| home.join(".cargo"));
    let Some(home) = std::env::var_os("CARGO_HOME").map(PathBuf::from).or_else(of_user) else {
        return Ok(());
    };
    let Ok(registries) = home.join("registry/src").read_dir() else { return Ok(()) };
    for registry in registries.flatten() {
        for each in crates {
            let version = each.package["version"].as_str().unwrap_or_default();
            let sources = registry.path().join(format!("{}-{version}", each.name));
            if sources.is_dir() {
                let failed = |error| format!("cannot remove {}: {error}", sources.display());
                std::fs::remove_dir_all(&sources).map_err(failed)?;
            }
        }
    }
    Ok(())
}

/// Checks the libraries with the oldest compiler that the manifests allow.
fn msrv(crates: &[Published]) -> Result<Outcome> {
    let versions: Vec<&str> =
        crates.iter().filter_map(|each| each.package["rust_version"].as_str()).collect();
    let version = *versions.first().ok_or("no crate states a `rust-version`")?;
    if versions.len() != crates.len() || versions.iter().any(|other| *other != version) {
        return Err("the crates state different versions of Rust, or none".into());
    }
    if let Err(why) = tools::toolchain(version) {
        return Ok(Outcome::Skipped(why));
    }
    for library in TLS_LIBRARIES {
        let mut command = Command::new("cargo");
        command.current_dir(crate::workspace::root()).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
        command.arg(format!("+{version}")).args(["check", "--quiet", "--locked", "--no-default-features"]);
        let with_feature = crates.iter().filter(|each| each.features().iter().any(|name| name == library));
        let names: Vec<String> = with_feature.map(|each| each.name.clone()).collect();
        select(&mut command, &names);
        command.args(["--features", library]).arg("--target-dir").arg(target_directory().join("msrv"));
        process::run(&mut command).map_err(|why| format!("with Rust {version}: {why}"))?;
    }
    println!("Rust {version} builds the libraries");
    Ok(Outcome::Passed)
}

/// Checks each crate without features, with each feature alone, and with all. A crate that always
/// speaks TLS needs a library for it in every set.
fn features(crates: &[Published]) -> Result<Outcome> {
    let mut count = 0;
    for each in crates {
        for set in sets(&each.features(), each.always_speaks_tls()) {
            let mut command = process::cargo();
            command.args(["check", "--quiet", "--locked", "--no-default-features", "--package", &each.name]);
            command.args(["--features", &set.join(",")]);
            command.arg("--target-dir").arg(target_directory().join("release-check"));
            process::run(&mut command)?;
            count += 1;
        }
    }
    println!("{count} sets of features");
    Ok(Outcome::Passed)
}

/// The smallest sets of features that build, each set with one more feature, and all features.
fn sets(features: &[String], needs_library: bool) -> Vec<Vec<&str>> {
    let (libraries, others): (Vec<&str>, Vec<&str>) =
        features.iter().map(String::as_str).partition(|name| TLS_LIBRARIES.contains(name));
    let mut sets: Vec<Vec<&str>> = libraries.iter().map(|library| vec![*library]).collect();
    let least = if needs_library { sets.first().cloned().unwrap_or_default() } else { Vec::new() };
    if !needs_library {
        sets.insert(0, Vec::new());
    }
    sets.extend(others.iter().map(|other| least.iter().copied().chain([*other]).collect()));
    if features.len() > 1 {
        sets.push(features.iter().map(String::as_str).collect());
    }
    sets
}

/// Builds the documentation; a warning is an error, for example a broken link.
fn docs(names: &[String]) -> Result<Outcome> {
    let mut command = process::cargo();
    command
        .args(["doc", "--quiet", "--locked", "--no-deps", "--all-features"])
        .env("RUSTDOCFLAGS", "-D warnings");
    select(&mut command, names);
    command.arg("--target-dir").arg(target_directory().join("release-check"));
    process::run(&mut command).map(|()| Outcome::Passed)
}

/// Checks licences, sources and duplicates with cargo-deny, and advisories if the database can be
/// fetched.
fn deny() -> Result<Outcome> {
    let deny = match tools::installed(&tools::DENY) {
        Ok(deny) => deny,
        Err(why) => return Ok(Outcome::Skipped(why)),
    };
    let mut command = tools::command(&deny);
    process::run(command.args(["check", "--hide-inclusion-graph", "bans", "licenses", "sources"]))?;
    let mut command = tools::command(&deny);
    let output = command.args(["check", "advisories"]).output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(Outcome::Passed),
        false if text.contains(NO_NETWORK) => {
            Ok(Outcome::Partly("advisories skipped: their database cannot be fetched".into()))
        }
        false => Err(format!("advisories: {text}")),
    }
}

fn select(command: &mut Command, names: &[String]) {
    command.args(names.iter().flat_map(|name| ["--package", name.as_str()]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn option_is_taken_out_of_the_arguments() {
        let of = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let taken = option(&of(&["api", "--since", "v1", "docs"]), "--since");
        assert!(
            matches!(&taken, Ok((Some(value), others)) if value == "v1" && *others == of(&["api", "docs"]))
        );
        assert!(matches!(option(&of(&["api"]), "--since"), Ok((None, others)) if others == of(&["api"])));
        assert!(option(&of(&["--since"]), "--since").is_err());
    }

    #[test]
    fn sets_are_the_least_each_feature_alone_and_all() {
        let of = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();

        assert_eq!(sets(&[], false), [Vec::<&str>::new()]);
        assert_eq!(sets(&of(&["statebank"]), false), [vec![], vec!["statebank"]]);
        let with_tls = of(&["ring", "vm-memory", "aws-lc-rs"]);
        let all = vec!["ring", "vm-memory", "aws-lc-rs"];
        let alone = [vec![], vec!["ring"], vec!["aws-lc-rs"], vec!["vm-memory"], all.clone()];
        assert_eq!(sets(&with_tls, false), alone);
        assert_eq!(sets(&with_tls, true), [vec!["ring"], vec!["aws-lc-rs"], vec!["ring", "vm-memory"], all]);
    }
}
