//! The test programs that cargo built, and their division into jobs.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::{Job, rules};
use crate::process::{self, Result};
use crate::{interop, roots};

/// A program that contains tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    pub package: String,
    /// `lib`, `bin`, `test` and so on.
    pub kind: String,
    /// The name of the target.
    pub target: String,
    pub program: PathBuf,
    /// The directory in which cargo would run the program.
    pub directory: PathBuf,
}

impl Binary {
    /// Parses one of cargo's messages; `None` if it does not report a test program.
    pub fn of(message: &Value) -> Option<Self> {
        if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
            return None;
        }
        let directory = Path::new(message["manifest_path"].as_str()?).parent()?.to_path_buf();
        Some(Self {
            package: package_of(message["package_id"].as_str()?),
            kind: message["target"]["kind"][0].as_str()?.to_owned(),
            target: message["target"]["name"].as_str()?.to_owned(),
            program: message["executable"].as_str()?.into(),
            directory,
        })
    }

    /// The jobs of the program.
    ///
    /// Each module of a crate's integration tests is one job, because it may rely on a process of
    /// its own. Any other program is one job.
    pub fn jobs(&self) -> Result<Vec<Job>> {
        let text = process::output(Command::new(&self.program).args(["--list", "--format", "terse"]))?;
        let tests: Vec<String> =
            text.lines().filter_map(|line| Some(line.strip_suffix(": test")?.to_owned())).collect();
        if self.kind != "test" {
            let whole = if self.kind == "lib" { self.package.clone() } else { self.name() };
            return Ok(if tests.is_empty() { Vec::new() } else { vec![self.job(whole, tests, false)] });
        }
        let mut groups: Vec<(String, Vec<String>)> = Vec::new();
        for test in tests {
            let module = test.split_once("::").map_or(String::new(), |(module, _)| module.to_owned());
            match groups.iter_mut().find(|(name, _)| *name == module) {
                Some((_, tests)) => tests.push(test),
                None => groups.push((module, vec![test])),
            }
        }
        let single = groups.len() == 1;
        let name = |module: String| match module.as_str() {
            "" => self.name(),
            _ => format!("{} {module}", self.name()),
        };
        Ok(groups.into_iter().map(|(module, tests)| self.job(name(module), tests, !single)).collect())
    }

    fn name(&self) -> String {
        format!("{} {}", self.package, self.target)
    }

    fn job(&self, name: String, tests: Vec<String>, named: bool) -> Job {
        let mut command = Command::new(&self.program);
        command.current_dir(&self.directory);
        command.env("CARGO_MANIFEST_DIR", &self.directory).env("CARGO_PKG_NAME", &self.package);
        command.arg(format!("--test-threads={}", rules::THREADS));
        if named {
            command.arg("--exact").args(&tests);
        }
        let is_interop = self.package == interop::PACKAGE;
        if is_interop {
            command.env("STERNA_ROOTS", roots::directory());
        }
        let job = Job::new(if is_interop { "interop" } else { "tests" }, name, command);
        let job = if is_interop { job.after(&["roots"]) } else { job };
        rules::apply(Job { tests, ..job })
    }
}

/// The package name in cargo's `path+file:///…/crates/sterna#0.1.0` or
/// `…/guests#sterna-guests@0.1.0`.
pub(super) fn package_of(id: &str) -> String {
    let (path, rest) = id.rsplit_once('#').unwrap_or((id, ""));
    let named = rest.split_once('@').map(|(name, _)| name);
    named.unwrap_or_else(|| path.rsplit('/').next().unwrap_or(path)).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_is_found_in_both_forms_of_an_id() {
        assert_eq!(package_of("path+file:///w/crates/sterna#0.1.0"), "sterna");
        assert_eq!(package_of("path+file:///w/guests#sterna-guests@0.1.0"), "sterna-guests");
    }

    #[test]
    fn of_takes_test_programs_only() {
        let message = |test: bool| {
            serde_json::json!({"reason": "compiler-artifact", "profile": {"test": test},
                "manifest_path": "/w/crates/sterna/Cargo.toml", "package_id": "path+file:///w/crates/sterna#0.1.0",
                "target": {"kind": ["test"], "name": "engine"}, "executable": "/w/target/debug/deps/engine-1"})
        };

        let binary = Binary::of(&message(true)).expect("a test program");

        assert_eq!((binary.package.as_str(), binary.target.as_str()), ("sterna", "engine"));
        assert_eq!(binary.directory, Path::new("/w/crates/sterna"));
        assert_eq!(Binary::of(&message(false)), None);
    }

    #[test]
    fn jobs_of_this_program_hold_its_tests() {
        let program = std::env::current_exe().expect("this program");
        let binary = |kind: &str| Binary {
            package: "xtask".into(),
            kind: kind.into(),
            target: "xtask".into(),
            program: program.clone(),
            directory: ".".into(),
        };

        let (whole, modules) =
            (binary("bin").jobs().expect("a list"), binary("test").jobs().expect("a list"));

        let mine = "suite::binary::tests::jobs_of_this_program_hold_its_tests";
        assert!(whole.len() == 1 && whole[0].tests.iter().any(|test| test == mine));
        let suite = modules.iter().find(|job| job.name == "xtask xtask suite").expect("a module");
        assert!(suite.tests.iter().all(|test| test.starts_with("suite::")));
        assert_eq!(modules.iter().map(|job| job.tests.len()).sum::<usize>(), whole[0].tests.len());
    }
}
