//! Images in Sterna's own format, in files and in stores, with a live QEMU: saved, restored at once and lazily, served,
//! converted.
//!
//! The guest counts and checks its own memory: after all moves the count has no gap.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};
use sterna_interop::{
    Accelerator, Builder, Failure, Guest, Qemu, Ram, Root, fill, sterna, sterna_does, unbroken,
};

/// A guest that rewrites and checks half of its RAM.
fn guest(root: &Root) -> Builder {
    Qemu::builder(root).machine("pc").memory_mib(64).guest(Guest::Boot)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

fn told(arguments: &[&str]) -> Result<Value, Failure> {
    let said = sterna_does(&[arguments, &["--json"]].concat())?;
    serde_json::from_str(&said).map_err(|error| format!("{error}: {said}"))
}

/// Runs `sterna`, which must refuse with status 2 and these words.
fn refused(arguments: &[&str], words: &[&str]) -> Result<(), Failure> {
    let output = sterna().args(arguments).output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.code() == Some(2) && words.iter().all(|word| said.contains(word)) {
        true => Ok(()),
        false => Err(format!("sterna {}: {}: {said}", arguments.join(" "), output.status)),
    }
}

/// Saves the guest of `source` after some ticks.
fn save(source: &mut Qemu, image: &str, more: &[&str]) -> Result<Value, Failure> {
    source.wait_for_ticks(2)?;
    let socket = source.operator_socket();
    let saved = told(&[&["save", text(&socket), image][..], more].concat())?;
    assert_eq!((&saved["format"], source.status()?.as_str()), (&json!("sterna"), "postmigrate"), "{saved}");
    Ok(saved)
}

/// Restores the image into a new machine that waits.
fn restore(builder: &Builder, image: &str, more: &[&str]) -> Result<Qemu, Failure> {
    let target = builder.clone().incoming_defer().spawn()?;
    let socket = target.operator_socket();
    let restored = told(&[&["restore", image, text(&socket)][..], more].concat())?;
    assert_eq!(
        (&restored["format"], &restored["is_running"]),
        (&json!("sterna"), &json!(true)),
        "{restored}"
    );
    Ok(target)
}

#[test]
fn guest_goes_on_through_files_layers_and_a_store_eagerly_and_lazily() -> Result<(), Failure> {
    let test = "guest_goes_on_through_files_layers_and_a_store_eagerly_and_lazily";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = guest(&root);
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let place = |name: &str| directory.path().join(name);
    let (full, other, layer, key) =
        (place("full.sterna"), place("other"), place("layer.sterna"), place("key"));
    std::fs::write(&key, [7; 32]).map_err(|error| error.to_string())?;
    let (key, wrong) = (["--key", text(&key)], place("wrong"));
    std::fs::write(&wrong, [8; 32]).map_err(|error| error.to_string())?;
    let in_store = |name: &str| format!("store:{}#{name}", place("store").display());
    let mut machines = vec![builder.clone().spawn()?];

    // A file.
    save(&mut machines[0], text(&full), &["--level", "auto"])?;
    machines.push(restore(&builder, text(&full), &[])?);

    // A layer whose base is in another directory.
    save(&mut machines[1], text(&layer), &["--base", text(&full)])?;
    let inspected = told(&["inspect", text(&layer)])?;
    assert_eq!(inspected["frames"]["layers"], 2, "{inspected}");
    std::fs::create_dir(&other).map_err(|error| error.to_string())?;
    std::fs::rename(&full, other.join("renamed")).map_err(|error| error.to_string())?;
    let socket = machines[1].operator_socket();
    refused(&["restore", text(&layer), text(&socket)], &["full.sterna", "--base"])?;
    let lazily = ["--lazy", "--base", text(&other)];
    machines.push(restore(&builder, text(&layer), &lazily)?);

    // A store, encrypted.
    let first = in_store("first");
    save(&mut machines[2], &first, &key)?;
    let socket = machines[2].operator_socket();
    refused(&["restore", &first, text(&socket)], &["--key"])?;
    refused(&["restore", &first, text(&socket), "--key", text(&wrong)], &["--key"])?;
    machines.push(restore(&builder, &first, &key)?);

    // An increment in the store, into a QEMU that the command starts.
    let second = in_store("second");
    save(&mut machines[3], &second, &[&key[..], &["--base", &first]].concat())?;
    let started = Started::lazily(&builder, &second, &key)?;
    let mut serials: Vec<String> = machines.iter().map(Qemu::serial).collect();
    serials.push(started.serial_after_ticks(2)?);
    let serials: Vec<&str> = serials.iter().map(String::as_str).collect();
    sterna_interop::ticks::unbroken_serials(&serials).map(drop)
}

/// A QEMU that `sterna restore` has started.
struct Started {
    directory: tempfile::TempDir,
    pid: i32,
}

impl Started {
    fn lazily(builder: &Builder, image: &str, more: &[&str]) -> Result<Self, Failure> {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let qemu = builder.command_in(directory.path())?;
        let mut command = sterna();
        command.args(["restore", image, "--lazy", "--json"]).args(more).arg("--");
        command.arg(qemu.get_program()).args(qemu.get_args());
        command.envs(qemu.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let output = command.output().map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(format!("{image}: {}", String::from_utf8_lossy(&output.stderr)));
        }
        let told: Value = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
        let pid = told["process"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        Ok(Self { directory, pid: pid.ok_or("no process")? })
    }

    fn serial_after_ticks(&self, ticks: usize) -> Result<String, Failure> {
        let begin = std::time::Instant::now();
        loop {
            let said = std::fs::read_to_string(self.directory.path().join("serial")).unwrap_or_default();
            if said.matches("checksum OK").count() >= ticks {
                return Ok(said);
            }
            if begin.elapsed() > sterna_interop::qemu::PATIENCE {
                return Err(format!("the guest says only: {said}"));
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid) {
            // It may have ended already.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

#[test]
fn image_of_a_store_is_served_to_a_qemu_that_listens() -> Result<(), Failure> {
    let test = "image_of_a_store_is_served_to_a_qemu_that_listens";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = guest(&root);
    let mut source = builder.clone().spawn()?;
    let key = source.directory().join("key");
    std::fs::write(&key, [9; 32]).map_err(|error| error.to_string())?;
    let image = format!("store:{}#a", source.directory().join("store").display());
    save(&mut source, &image, &["--key", text(&key)])?;
    let mut target = builder.incoming_defer().spawn()?;
    target.capabilities(&["postcopy-ram"])?;
    let address = target.listen_on_unix()?;
    refused(&["serve", &image, &address], &["--key"])?;

    let mut serve = sterna();
    serve.args(["serve", &image, &address, "--json", "--key", text(&key)]);
    let serving = serve.stdout(Stdio::piped()).stderr(Stdio::piped()).output();
    let output = serving.map_err(|error| error.to_string())?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target.wait_for_migration()?;
    target.resume()?;
    target.wait_for_ticks(2)?;

    unbroken(&[&source, &target]).map(drop)
}

#[test]
fn saved_image_converts_to_mapped_ram_and_back_with_equal_bytes() -> Result<(), Failure> {
    let test = "saved_image_converts_to_mapped_ram_and_back_with_equal_bytes";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = Qemu::builder(&root).memory_mib(64).accelerator(Accelerator::Nothing).ram(Ram::File);
    let mut source = builder.clone().spawn()?;
    source.stop()?;
    fill(&source.directory().join("ram"), 23)?;
    let directory = source.directory().to_owned();
    let place = |name: &str| directory.join(name);
    let own = place("own.sterna");
    sterna_does(&["save", text(&source.operator_socket()), text(&own)])?;
    let convert = |from: &Path, to: &str, more: &[&str]| -> Result<PathBuf, Failure> {
        let to = place(to);
        sterna_does(&[&["convert", text(from), text(&to)][..], more].concat())?;
        Ok(to)
    };

    for format in ["mapped-ram", "legacy"] {
        let first = convert(&own, &format!("first-{format}"), &["--format", format])?;
        sterna_does(&["verify", text(&first)])?;
        // Other extents, another level, a key: the frames differ, and the files do not.
        let key = place("key");
        std::fs::write(&key, [3; 32]).map_err(|error| error.to_string())?;
        let frames = ["--extent", "512k", "--level", "auto", "--key", text(&key)];
        let again = convert(&first, &format!("again-{format}.sterna"), &frames)?;
        let back =
            convert(&again, &format!("back-{format}"), &["--format", format, "--source-key", text(&key)])?;

        let read = |path: &Path| std::fs::read(path).map_err(|error| error.to_string());
        assert!(read(&first)? == read(&back)?, "{format}: other bytes");
    }

    // What QEMU wrote itself comes back, too.
    source.resume()?;
    source.stop()?;
    let written = place("written");
    source.capabilities(&["mapped-ram"])?;
    source.migrate(&format!("file:{}", written.display()))?;
    let stored = convert(&written, "written.sterna", &[])?;
    let back = convert(&stored, "written-back", &["--format", "mapped-ram"])?;
    sterna_does(&["diff", text(&written), text(&back)])?;
    let again = convert(&back, "written-again.sterna", &[])?;
    let twice = convert(&again, "written-twice", &["--format", "mapped-ram"])?;
    let read = |path: &Path| std::fs::read(path).map_err(|error| error.to_string());
    assert!(read(&back)? == read(&twice)?, "mapped-ram of QEMU: other bytes");
    Ok(())
}
