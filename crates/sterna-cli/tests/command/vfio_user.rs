//! `sterna run --vfio-user`: VMs with devices in other processes migrate and are saved.
//! Here the devices are threads of the test.
#![allow(clippy::print_stderr, reason = "a test that cannot run here says so")]

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use sterna_devices::statebank::{BankServer, StateBank, StateBankConfig, Verdict};
use sterna_devices::vfio::MigState;

use crate::certificates;

const LIMIT: Duration = Duration::from_secs(60);
/// RAM that the guest does not use.
const WINDOW: (u64, u64) = (0x4_0000, 0x4_0000);

/// A VM and its devices; the VM is killed when the test ends.
struct Machine {
    child: Child,
    qmp: PathBuf,
    banks: Vec<BankServer>,
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both calls fail if the process has already exited, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a VM. None: this host cannot run it.
fn start(
    test: &str,
    directory: &Path,
    name: &str,
    banks: Vec<StateBankConfig>,
    more: &[&str],
) -> Option<Machine> {
    let path = |index: usize| directory.join(format!("{name}{index}"));
    let arguments: Vec<_> =
        (0..banks.len()).map(|index| format!("--vfio-user={}", path(index).display())).collect();
    let serve = |(index, bank)| StateBank::new(bank).unwrap().serve(&path(index)).unwrap();
    let banks = banks.into_iter().enumerate().map(serve).collect();
    let (qmp, said) = (directory.join(format!("{name}.qmp")), directory.join(format!("{name}.said")));
    let mut child = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["run", "--machine=kvm", "--ram=64M", "--rate=1000"])
        .arg(format!("--qmp=unix:{}", qmp.display()))
        .arg(format!("--exit-with-parent={}", std::process::id()))
        .args(arguments)
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&said).unwrap())
        .spawn()
        .unwrap();
    let began = Instant::now();
    // The socket's file exists a moment before the VM listens.
    while UnixStream::connect(&qmp).is_err() {
        assert!(began.elapsed() < LIMIT, "no monitor");
        if child.try_wait().unwrap().is_some() {
            let said = std::fs::read_to_string(said).unwrap();
            assert!(said.contains("/dev/kvm"), "{said}");
            eprintln!("SKIPPED {test}: {}", said.trim());
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Some(Machine { child, qmp, banks })
}

/// A VM whose devices write, and a VM that waits for it.
fn pair(test: &str, directory: &Path) -> Option<(Machine, Machine)> {
    pair_with(test, directory, &[])
}

/// As [`pair`], with the arguments `more` for the VM whose devices write.
fn pair_with(test: &str, directory: &Path, more: &[&str]) -> Option<(Machine, Machine)> {
    let bank =
        |seed| StateBankConfig { state_bytes: 6 << 20, precopy_percent: 50, seed, ..Default::default() };
    let writer = StateBankConfig { dma_rate: 2000, dma_window: Some(WINDOW), dirty_rate: 1 << 20, ..bank(1) };
    let source = start(test, directory, "a", vec![writer, bank(2)], more)?;
    let target = start(test, directory, "b", vec![bank(3), bank(4)], &["--incoming=defer"])?;
    let began = Instant::now();
    while source.banks[0].bank().status().dma_writes < 100 {
        assert!(began.elapsed() < LIMIT, "the device does not write");
        std::thread::sleep(Duration::from_millis(10));
    }
    Some((source, target))
}

fn sterna(command: &str, first: &Path, second: &Path, more: &[&str]) {
    let mut sterna = Command::new(env!("CARGO_BIN_EXE_sterna"));
    let output: Output = sterna.arg(command).arg(first).arg(second).args(more).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

fn assert_moved(source: &Machine, target: &Machine) {
    let (from, to) = (&source.banks, &target.banks);
    for (from, to) in from.iter().zip(to) {
        assert_eq!(from.bank().status().state, MigState::Stop);
        assert_eq!(to.bank().status().state, MigState::Running);
        assert_eq!(to.bank().status().loaded, Verdict::Good);
    }
    assert_eq!(to[0].bank().status().ram, Verdict::Good);
    assert_eq!(to[1].bank().status().digest, from[1].bank().status().digest);
}

#[test]
fn migrate_moves_devices_with_the_machine() {
    let directory = tempfile::tempdir().unwrap();
    let Some((source, target)) = pair("migrate_moves_devices_with_the_machine", directory.path()) else {
        return;
    };
    let to = PathBuf::from(format!("unix:{}", directory.path().join("migration").display()));
    let more = [
        &format!("--dest-qmp={}", target.qmp.display())[..],
        "--cap=multifd",
        "--set=multifd-channels=3",
        // Long enough for a busy host.
        "--set=downtime-limit=20000",
    ];

    sterna("migrate", &source.qmp, &to, &more);

    assert_moved(&source, &target);
}

#[test]
fn devices_move_with_compressed_pages_over_tls() {
    let certificates = certificates::good_directory();
    let tls = format!("--tls-dir={}", certificates.path().display());
    for (rings, slower, compression, zero_pages) in [
        (&[][..], "auto-converge", "zstd", "multifd"),
        (&["--dirty-ring-size=1024"], "dirty-limit", "zlib", "legacy"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let test = "devices_move_with_compressed_pages_over_tls";
        let Some((source, target)) = pair_with(test, directory.path(), rings) else { return };
        let more = [
            &format!("--dest-qmp={}", target.qmp.display())[..],
            &tls,
            &format!("--cap={slower}"),
            "--cap=multifd",
            "--cap=switchover-ack",
            "--cap=return-path",
            &format!("--set=multifd-compression={compression}"),
            &format!("--set=zero-page-detection={zero_pages}"),
            "--set=downtime-limit=20000",
        ];

        sterna("migrate", &source.qmp, Path::new("tcp:localhost:0"), &more);

        assert_moved(&source, &target);
    }
}

#[test]
fn save_and_restore_keep_devices_with_the_machine() {
    let directory = tempfile::tempdir().unwrap();
    for form in ["mapped-ram", "legacy"] {
        let place = directory.path().join(form);
        std::fs::create_dir(&place).unwrap();
        let Some((source, target)) = pair("save_and_restore_keep_devices_with_the_machine", &place) else {
            return;
        };
        let image = place.join("image");

        sterna("save", &source.qmp, &image, &["--format", form]);
        sterna("restore", &image, &target.qmp, &[]);

        assert_moved(&source, &target);
    }
}

#[test]
fn device_that_is_not_there_is_named() {
    let output = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["run", "--machine=process", "--ram=64M", "--vfio-user=/nonexistent/device"])
        .output()
        .unwrap();

    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("--vfio-user"), "{said}");
}
