//! The library as `install.sh` installs it, in a prefix of this test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// An installation, which is made once per process.
pub(crate) struct Installed {
    prefix: tempfile::TempDir,
}

/// The installation; `None` after a line that says why `test` is skipped.
pub(crate) fn or_skip(test: &str) -> Option<&'static Installed> {
    static INSTALLED: OnceLock<Option<Installed>> = OnceLock::new();
    if !exists("cc") {
        eprintln!("SKIPPED {test}: there is no C compiler, cc");
        return None;
    }
    INSTALLED.get_or_init(|| Some(Installed::new())).as_ref()
}

/// The directory of this crate.
pub(crate) fn crate_directory() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Whether a program is on the PATH.
pub(crate) fn exists(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Runs a command to its end. Panics with its output if it fails.
pub(crate) fn run(command: &mut Command) -> String {
    let done = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(
        done.status.success(),
        "{command:?}: {}\n{text}{}",
        done.status,
        String::from_utf8_lossy(&done.stderr)
    );
    text
}

impl Installed {
    fn new() -> Self {
        let prefix = tempfile::tempdir().expect("a directory");
        // cargo builds the static library with this test, because it is an artifact of the library's target.
        let program = std::env::current_exe().expect("this program");
        let archive = program.with_file_name("libsterna_capi.a");
        let mut install = Command::new(crate_directory().join("install.sh"));
        run(install.arg("--prefix").arg(prefix.path()).arg("--archive").arg(archive));
        Self { prefix }
    }

    pub(crate) fn include(&self) -> PathBuf {
        self.prefix.path().join("include")
    }

    pub(crate) fn lib(&self) -> PathBuf {
        self.prefix.path().join("lib")
    }

    pub(crate) fn header(&self) -> PathBuf {
        self.include().join("sterna.h")
    }

    pub(crate) fn library(&self) -> PathBuf {
        self.lib().join("libsterna.so")
    }

    /// `command` finds the library when it runs, and its description when it builds.
    pub(crate) fn visible_to<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("LD_LIBRARY_PATH", self.lib()).env("PKG_CONFIG_PATH", self.lib().join("pkgconfig"))
    }

    /// As [`Installed::visible_to`], with the flags for a compiler, because there may be no pkg-config.
    pub(crate) fn with_flags<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        self.visible_to(command)
            .env("STERNA_CFLAGS", format!("-I{}", self.include().display()))
            .env("STERNA_LIBS", format!("-L{} -lsterna", self.lib().display()))
    }
}
