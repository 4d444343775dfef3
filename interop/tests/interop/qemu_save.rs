//! `sterna save` and `sterna restore` with a live QEMU: every form, and many failures.
//!
//! The guest counts and checks its own memory. After any failure, it must continue to count in the right
//! machine, and there must be a complete image or none.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_interop::qemu::PATIENCE;
use sterna_interop::{Failure, Guest, Qemu, Root, skip, sterna, unbroken};

const DOMAIN: &str = "<domain type='qemu'><name>counting</name></domain>\n";

fn guest(root: &Root) -> sterna_interop::qemu::Builder {
    Qemu::builder(root).guest(Guest::Boot)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

fn run(arguments: &[&str]) -> Result<Output, Failure> {
    sterna().args(arguments).output().map_err(|error| error.to_string())
}

/// Runs `sterna`, which must exit with `status` and print all of `words` as an error.
fn fails(arguments: &[&str], status: i32, words: &[&str]) -> Result<(), Failure> {
    let output = run(arguments)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.code() != Some(status) || words.iter().any(|word| !said.contains(word)) {
        return Err(format!("sterna {}: {}, said: {said}", arguments.join(" "), output.status));
    }
    Ok(())
}

fn works(arguments: &[&str]) -> Result<Value, Failure> {
    let output = run(&[arguments, &["--json"]].concat())?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("sterna {}: {}, said: {said}", arguments.join(" "), output.status));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
}

/// Names in `directory` that contain `part`, including hidden ones.
fn names_with(directory: &Path, part: &str) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.contains(part))
        .collect()
}

fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) -> Result<(), Failure> {
    let begin = Instant::now();
    while !is_there() {
        if begin.elapsed() > PATIENCE {
            return Err(format!("{what} did not come"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Starts a save and waits until the VM writes. The save takes long, because xz compresses slowly.
fn slow_save(qemu: &mut Qemu) -> Result<(Child, PathBuf), Failure> {
    let image = qemu.directory().join("slow.img");
    let socket = qemu.operator_socket();
    let mut command = sterna();
    command.args(["save", text(&socket), text(&image), "--format", "legacy-xz"]);
    command.stderr(Stdio::piped()).stdout(Stdio::null());
    let child = command.spawn().map_err(|error| error.to_string())?;
    wait_for("the migration's begin", || {
        qemu.execute("query-migrate", Value::Null).is_ok_and(|query| query["status"] == "active")
    })?;
    Ok((child, image))
}

/// The settings of the VM.
fn settings(qemu: &mut Qemu) -> Result<[Value; 2], Failure> {
    Ok([
        qemu.execute("query-migrate-capabilities", Value::Null)?,
        qemu.execute("query-migrate-parameters", Value::Null)?,
    ])
}

#[test]
fn save_and_restore_in_every_form_lets_the_guest_go_on() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("save_and_restore_in_every_form_lets_the_guest_go_on") else {
        return Ok(());
    };
    let mut machines = vec![guest(&root).spawn()?];
    let xml = machines[0].directory().join("domain.xml");
    std::fs::write(&xml, DOMAIN).map_err(|error| error.to_string())?;
    for form in [
        "mapped-ram",
        "legacy",
        "legacy-zstd",
        "libvirt-raw",
        "libvirt-sparse",
        "libvirt-gzip",
        "libvirt-bzip2",
        "libvirt-xz",
        "libvirt-lzop",
        "libvirt-zstd",
    ] {
        let source = machines.last_mut().expect("there is one from the start");
        source.wait_for_ticks(2).map_err(|why| format!("before {form}: {why}"))?;
        let image = xml.with_file_name(form);
        let mut save = vec!["save", text(&image), "--format", form];
        let socket = source.operator_socket();
        save.insert(1, text(&socket));
        if form.starts_with("libvirt") {
            save.extend(["--xml", text(&xml)]);
        }

        let saved = works(&save)?;

        assert_eq!(source.status()?, "postmigrate", "{form}");
        assert_eq!((&saved["format"], &saved["was_running"]), (&json!(form), &json!(true)));
        let target = guest(&root).incoming_defer().spawn()?;
        let restored = works(&["restore", text(&image), text(&target.operator_socket())])?;
        assert_eq!((&restored["format"], &restored["is_running"]), (&json!(form), &json!(true)));
        machines.push(target);
        std::fs::remove_file(&image).map_err(|error| error.to_string())?;
    }

    machines.last_mut().expect("there are many").wait_for_ticks(3)?;

    unbroken(&machines.iter().collect::<Vec<_>>()).map(drop)
}

#[test]
fn save_of_a_running_guest_keeps_the_operators_settings_and_can_resume() -> Result<(), Failure> {
    let test = "save_of_a_running_guest_keeps_the_operators_settings_and_can_resume";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut qemu = guest(&root).spawn()?;
    qemu.wait_for_ticks(1)?;
    // Each of these settings would spoil a save, or crash QEMU during a save.
    qemu.capabilities(&["return-path", "auto-converge", "release-ram"])?;
    qemu.parameters(json!({"direct-io": true, "multifd-channels": 7, "max-bandwidth": 1 << 20}))?;
    let before = settings(&mut qemu)?;
    let socket = qemu.operator_socket();

    for form in ["mapped-ram", "legacy", "legacy-zstd"] {
        for direct in [false, true] {
            let image = qemu.directory().join(form);
            let mut save =
                vec!["save", text(&socket), text(&image), "--format", form, "--resume-after", "--force"];
            save.push(if direct { "--direct-io" } else { "--no-direct-io" });
            if direct && form == "legacy" {
                // QEMU writes a stream only through the page cache.
                fails(&save, 2, &["--direct-io", "mapped-ram"])?;
                continue;
            }

            let saved = works(&save)?;

            assert_eq!((&saved["is_running"], &saved["warning"]), (&json!(true), &Value::Null));
            assert_eq!(saved["direct_io"], json!(direct), "{form}");
            assert_eq!(settings(&mut qemu)?, before, "{form}");
            qemu.wait_for_ticks(1)?;
        }
    }

    let sets = qemu.execute("query-fdsets", Value::Null)?;
    assert_eq!(sets, json!([]), "a descriptor was left in the VM");
    unbroken(&[&qemu]).map(drop)
}

#[test]
fn save_onto_an_existing_file_needs_force() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("save_onto_an_existing_file_needs_force") else { return Ok(()) };
    let mut qemu = guest(&root).spawn()?;
    qemu.wait_for_ticks(1)?;
    let (socket, image) = (qemu.operator_socket(), qemu.directory().join("vm.img"));
    std::fs::write(&image, "precious").map_err(|error| error.to_string())?;

    fails(&["save", text(&socket), text(&image)], 2, &["vm.img"])?;
    assert_eq!(std::fs::read(&image).ok().as_deref(), Some(&b"precious"[..]));
    assert_eq!(qemu.status()?, "running");
    works(&["save", text(&socket), text(&image), "--force"])?;

    assert!(std::fs::metadata(&image).is_ok_and(|there| there.len() > 1 << 20));
    assert_eq!(names_with(qemu.directory(), "vm.img"), ["vm.img"]);
    Ok(())
}

#[test]
fn save_of_a_qemu_that_is_killed_leaves_no_file() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("save_of_a_qemu_that_is_killed_leaves_no_file") else { return Ok(()) };
    let mut qemu = guest(&root).memory_mib(512).spawn()?;
    qemu.wait_for_ticks(1)?;
    let (child, _) = slow_save(&mut qemu)?;

    qemu.kill();

    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("no image"), "{said}");
    assert_eq!(names_with(qemu.directory(), "slow.img"), [""; 0]);
    Ok(())
}

#[test]
fn save_that_is_cancelled_lets_the_guest_run_on() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("save_that_is_cancelled_lets_the_guest_run_on") else { return Ok(()) };
    let mut qemu = guest(&root).memory_mib(512).spawn()?;
    qemu.wait_for_ticks(1)?;
    let before = settings(&mut qemu)?;
    let (child, _) = slow_save(&mut qemu)?;

    Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .map_err(|error| error.to_string())?;

    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(names_with(qemu.directory(), "slow.img"), [""; 0]);
    qemu.wait_for_status("running")?;
    qemu.wait_for_ticks(2)?;
    assert_eq!(settings(&mut qemu)?, before);
    unbroken(&[&qemu]).map(drop)
}

#[test]
fn save_onto_a_full_disk_lets_the_guest_run_on() -> Result<(), Failure> {
    let test = "save_onto_a_full_disk_lets_the_guest_run_on";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let place = tempfile::tempdir().map_err(|error| error.to_string())?;
    let mut probe = Command::new("unshare");
    probe.args(PRIVATE).arg("mount -t tmpfs -o size=256k none \"$0\"").arg(place.path());
    let probed = probe.output().map_err(|error| error.to_string())?;
    if !probed.status.success() {
        let said = String::from_utf8_lossy(&probed.stderr).into_owned();
        skip(test, &format!("no private file system can be mounted here: {said}"));
        return Ok(());
    }
    for form in ["mapped-ram", "legacy", "legacy-gzip"] {
        let mut lives_on = false;
        for _ in 0..3 {
            lives_on |= qemu_lives_on_when_its_image_does_not_fit(&root, form)?;
            if lives_on {
                break;
            }
        }
        assert!(lives_on, "{form}: QEMU crashes each time");
    }
    Ok(())
}

/// Runs a command in a mount namespace of its own.
const PRIVATE: [&str; 5] = ["--user", "--map-root-user", "--mount", "sh", "-c"];

/// Returns false if QEMU has crashed. QEMU 11.1.3 sometimes crashes when several of its threads write and one
/// fails (observed: SIGSEGV in `mig/src/send_0`, at address 0).
fn qemu_lives_on_when_its_image_does_not_fit(root: &Root, form: &str) -> Result<bool, Failure> {
    let mut qemu = guest(root).spawn()?;
    qemu.wait_for_ticks(1)?;
    let small = qemu.directory().join("small");
    std::fs::create_dir(&small).map_err(|error| error.to_string())?;
    let (socket, image) = (qemu.operator_socket(), small.join("vm.img"));
    // A file system that only this command can see; the VM gets descriptors.
    let script = "mount -t tmpfs -o size=256k none \"$1\" || exit 77; shift; \"$@\"; code=$?; \
                  ls -A \"$0\" >&2; exit $code";
    let output = Command::new("unshare")
        .args(PRIVATE)
        .args([script, text(&small), text(&small)])
        .arg(sterna().get_program())
        .args(["save", text(&socket), text(&image), "--format", form])
        .output()
        .map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();

    assert_eq!(output.status.code(), Some(1), "{form}: {said}");
    assert!(!said.lines().any(|line| line.ends_with(".partial") || line == "vm.img"), "{form}: {said}");
    if said.contains("monitor was lost") {
        let begin = Instant::now();
        while qemu.ended().is_none() && begin.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(10));
        }
        let signal = qemu.ended().and_then(|status| status.signal());
        assert_eq!(signal, Some(libc::SIGSEGV), "{form}: {said}");
        return Ok(false);
    }
    assert!(said.contains("room") || said.contains("full") || said.contains("space"), "{form}: {said}");
    qemu.wait_for_status("running")?;
    qemu.wait_for_ticks(1)?;
    unbroken(&[&qemu]).map(|_| true)
}

#[test]
fn restore_of_a_cut_image_is_refused_before_qemu_sees_it() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("restore_of_a_cut_image_is_refused_before_qemu_sees_it") else {
        return Ok(());
    };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    let mut target = guest(&root).incoming_defer().spawn()?;
    let (from, to) = (source.operator_socket(), target.operator_socket());
    let (image, cut) = (source.directory().join("vm.img"), source.directory().join("cut.img"));
    for form in ["mapped-ram", "legacy"] {
        works(&["save", text(&from), text(&image), "--format", form, "--force", "--resume-after"])?;
        let bytes = std::fs::read(&image).map_err(|error| error.to_string())?;
        for keep in [0, 7, 100, bytes.len() / 3, bytes.len() / 2, bytes.len() - 200_000, bytes.len() - 1] {
            std::fs::write(&cut, &bytes[..keep]).map_err(|error| error.to_string())?;

            let output = run(&["restore", text(&cut), text(&to)])?;

            assert_eq!(output.status.code(), Some(2), "{form} cut to {keep}");
            assert_eq!(target.status()?, "inmigrate", "{form} cut to {keep}");
        }
    }

    works(&["save", text(&from), text(&image), "--force"])?;
    fails(&["save", text(&from), text(&cut), "--force"], 1, &["saved before"])?;
    works(&["restore", text(&image), text(&to)])?;
    target.wait_for_ticks(2)?;
    unbroken(&[&source, &target]).map(drop)
}

#[test]
fn restore_into_another_machine_is_refused_before_qemu_sees_it() -> Result<(), Failure> {
    let test = "restore_into_another_machine_is_refused_before_qemu_sees_it";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    let (from, image) = (source.operator_socket(), source.directory().join("vm.img"));
    works(&["save", text(&from), text(&image)])?;
    let mut larger = guest(&root).memory_mib(128).incoming_defer().spawn()?;
    let mut other = guest(&root).machine("q35").incoming_defer().spawn()?;

    fails(&["restore", text(&image), text(&larger.operator_socket())], 1, &["pc.ram", "memory"])?;
    fails(&["restore", text(&image), text(&other.operator_socket())], 1, &["pc-q35", "-machine"])?;
    fails(&["restore", text(&image), text(&from)], 1, &["-incoming defer"])?;

    assert_eq!((larger.status()?, other.status()?), ("inmigrate".into(), "inmigrate".into()));
    Ok(())
}

#[test]
fn restore_starts_the_guest_as_it_was_or_as_it_is_told() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("restore_starts_the_guest_as_it_was_or_as_it_is_told") else {
        return Ok(());
    };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    let xml = source.directory().join("domain.xml");
    std::fs::write(&xml, DOMAIN).map_err(|error| error.to_string())?;
    let (from, image) = (source.operator_socket(), source.directory().join("vm.img"));
    for (running, option, form, expected) in [
        (true, "--paused", "mapped-ram", "paused"),
        (true, "--paused", "libvirt-sparse", "paused"),
        (false, "", "mapped-ram", "paused"),
        (false, "", "libvirt-raw", "paused"),
        (false, "--running", "legacy", "running"),
        (true, "", "libvirt-sparse", "running"),
    ] {
        // After a save, only `cont` leaves the state `postmigrate`.
        source.execute("cont", Value::Null)?;
        if !running {
            source.stop()?;
        }
        let mut save = vec!["save", text(&from), text(&image), "--force", "--format", form];
        if form.starts_with("libvirt") {
            save.extend(["--xml", text(&xml)]);
        }
        let saved = works(&save)?;
        assert_eq!(saved["was_running"], json!(running), "{form}");
        let mut target = guest(&root).incoming_defer().spawn()?;
        let socket = target.operator_socket();
        let mut restore = vec!["restore", text(&image), text(&socket)];
        restore.extend((!option.is_empty()).then_some(option));

        let restored = works(&restore)?;

        assert_eq!(target.status()?, expected, "{form} {option}");
        assert_eq!(restored["is_running"], json!(expected == "running"));
    }
    Ok(())
}

#[test]
fn restore_goes_past_the_page_cache_if_it_is_told_to() -> Result<(), Failure> {
    let test = "restore_goes_past_the_page_cache_if_it_is_told_to";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    let image = source.directory().join("vm.img");
    works(&["save", text(&source.operator_socket()), text(&image), "--format", "mapped-ram"])?;
    for (option, direct) in [("--direct-io", true), ("--no-direct-io", false)] {
        let mut target = guest(&root).incoming_defer().spawn()?;

        let restored = works(&["restore", text(&image), text(&target.operator_socket()), option])?;

        assert_eq!(restored["direct_io"], json!(direct));
        target.wait_for_ticks(2)?;
        unbroken(&[&source, &target])?;
    }
    Ok(())
}

#[test]
fn restore_with_a_command_line_starts_it_and_leaves_it_running() -> Result<(), Failure> {
    let test = "restore_with_a_command_line_starts_it_and_leaves_it_running";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    let image = source.directory().join("vm.img");
    works(&["save", text(&source.operator_socket()), text(&image)])?;
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let qemu = guest(&root).command_in(directory.path())?;
    let restore = |more: &[&str]| {
        let mut command = sterna();
        command.args(["restore", text(&image), "--json", "--"]).arg(qemu.get_program()).args(qemu.get_args());
        command.envs(qemu.get_envs().filter_map(|(name, value)| Some((name, value?)))).args(more);
        command.output().map_err(|error| error.to_string())
    };

    let refused = restore(&["-nonsense"])?;
    let output = restore(&[])?;

    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("-nonsense"), "QEMU's own words are missing: {said}");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    let monitor = PathBuf::from(told["monitor"].as_str().expect("where its monitor is"));
    // The test must end this process in any case.
    let _started =
        Started { process: told["process"].as_u64().expect("its process"), monitor: monitor.clone() };
    let serial = directory.path().join("serial");
    let come = wait_for("a tick of the restored guest", || {
        std::fs::read_to_string(&serial).is_ok_and(|text| text.matches("checksum OK").count() >= 2)
    });
    works_raw(&["info", text(&monitor)])?;
    come?;
    let restored = std::fs::read_to_string(&serial).map_err(|error| error.to_string())?;
    sterna_interop::ticks::unbroken_serials(&[&source.serial(), &restored]).map(drop)
}

/// A VM that `sterna restore` has started and left running.
struct Started {
    process: u64,
    monitor: PathBuf,
}

impl Drop for Started {
    fn drop(&mut self) {
        // The calls fail if the process has ended, and that is the goal.
        let _ = Command::new("kill").args(["-9", &self.process.to_string()]).status();
        if let Some(place) = self.monitor.parent() {
            let _ = std::fs::remove_dir_all(place);
        }
    }
}

/// Runs `sterna`, which must succeed.
fn works_raw(arguments: &[&str]) -> Result<(), Failure> {
    let output = run(arguments)?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}
