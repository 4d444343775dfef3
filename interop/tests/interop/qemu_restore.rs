//! `sterna restore`, `migrate` and `plan` with unsuitable QEMUs. They do not match the image, the other side
//! or the command.

use std::path::Path;
use std::process::Output;

use serde_json::Value;
use sterna_interop::{Accelerator, Builder, Failure, Qemu, Root, sterna, sterna_does};

const RNG: [&str; 2] = ["-device", "virtio-rng-pci,addr=5"];

fn machine(root: &Root) -> Builder {
    Qemu::builder(root).machine("q35").memory_mib(32).accelerator(Accelerator::Nothing)
}

fn run(arguments: &[&str]) -> Result<(Option<i32>, String), Failure> {
    let Output { status, stderr, .. } =
        sterna().args(arguments).output().map_err(|error| error.to_string())?;
    Ok((status.code(), String::from_utf8_lossy(&stderr).into_owned()))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

#[test]
fn restore_into_another_machine_is_refused_by_name_and_the_machine_still_waits() -> Result<(), Failure> {
    let test = "restore_into_another_machine_is_refused_by_name_and_the_machine_still_waits";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let source = machine(&root).args(&RNG).args(&["-smp", "2"]).spawn()?;
    let images = ["mapped-ram", "legacy"].map(|format| (format, source.directory().join(format)));
    sterna_does(&["save", text(&source.operator_socket()), text(&images[0].1)])?;
    sterna_does(&["convert", text(&images[0].1), text(&images[1].1), "--format", "legacy"])?;
    for (format, image) in &images {
        for (arguments, words) in [
            (&["-smp", "2"][..], ["0000:00:05.0/virtio-rng", "same slots"]),
            (
                &["-smp", "2", "-device", "virtio-rng-pci,addr=6"],
                ["0000:00:05.0/virtio-rng", "virtio-rng-pci at 0000:00:06.0"],
            ),
            (&["-device", "virtio-rng-pci,addr=5"], ["2 processors", "-smp 2"]),
        ] {
            let mut target = machine(&root).args(arguments).incoming_defer().spawn()?;

            let (code, said) = run(&["restore", text(image), text(&target.operator_socket())])?;

            assert_eq!(code, Some(1), "{format} {arguments:?}: {said}");
            assert!(words.iter().all(|word| said.contains(word)), "{format} {arguments:?}: {said}");
            assert_eq!(target.status()?, "inmigrate", "{format} {arguments:?}");
        }
        let more = ["-smp", "2", "-device", "virtio-balloon-pci,addr=7"];
        let mut target = machine(&root).args(&RNG).args(&more).incoming_defer().spawn()?;

        let (code, said) = run(&["restore", text(image), text(&target.operator_socket())])?;

        assert_eq!(code, Some(0), "{format}: {said}");
        assert!(said.contains("virtio-balloon-pci at 0000:00:07.0"), "{format}: {said}");
        assert_eq!(target.status()?, "running", "{format}");
    }
    Ok(())
}

#[test]
fn restore_into_a_qemu_that_was_started_stopped_leaves_its_guest_paused() -> Result<(), Failure> {
    let test = "restore_into_a_qemu_that_was_started_stopped_leaves_its_guest_paused";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let source = machine(&root).spawn()?;
    let xml = source.directory().join("xml");
    std::fs::write(&xml, "<domain type='qemu'><name>a</name></domain>").map_err(|error| error.to_string())?;
    let images = ["bare", "libvirt"].map(|name| source.directory().join(name));
    sterna_does(&["save", text(&source.operator_socket()), text(&images[0])])?;
    let container = ["--format", "libvirt-raw", "--xml", text(&xml)];
    sterna_does(&[&["convert", text(&images[0]), text(&images[1])][..], &container].concat())?;
    for image in &images {
        for lazy in [None, Some("--lazy")] {
            let mut target = machine(&root).arg("-S").incoming_defer().spawn()?;
            let socket = target.operator_socket();
            let mut arguments = vec!["restore", text(image), text(&socket)];
            arguments.extend(lazy);

            let (code, said) = run(&arguments)?;

            assert_eq!(code, Some(0), "{arguments:?}: {said}");
            let state = target.status()?;
            assert!(["paused", "prelaunch"].contains(&state.as_str()), "{arguments:?}: {state}");
            // An operator can still resume the guest.
            target.resume()?;
            assert_eq!(target.status()?, "running", "{arguments:?}");
        }
    }
    Ok(())
}

#[test]
fn migrate_to_a_qemu_with_other_memory_blocks_is_refused_in_both_directions() -> Result<(), Failure> {
    let test = "migrate_to_a_qemu_with_other_memory_blocks_is_refused_in_both_directions";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let dimm = [
        "-m",
        "slots=1,maxmem=64M",
        "-object",
        "memory-backend-ram,id=more,size=16M",
        "-device",
        "pc-dimm,memdev=more",
    ];
    for (leaves, arrives, word) in [(&dimm[..], &[][..], "and unix:"), (&[], &dimm, "without that memory")] {
        let mut source = machine(&root).args(leaves).spawn()?;
        let mut target = machine(&root).args(arrives).incoming_defer().spawn()?;
        let (from, to) = (source.operator_socket(), target.operator_socket());

        let (code, said) = run(&["migrate", text(&from), "tcp:127.0.0.1:0", "--dest-qmp", text(&to)])?;

        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("`more`") || said.contains("/objects/more"), "{said}");
        assert!(said.contains(word), "{said}");
        assert_eq!((source.status()?, target.status()?), ("running".into(), "inmigrate".into()));
    }
    Ok(())
}

#[test]
fn plan_and_lazy_restore_work_with_qemu_7_2() -> Result<(), Failure> {
    let test = "plan_and_lazy_restore_work_with_qemu_7_2";
    let Some(root) = Root::qemu_bookworm_for(test) else { return Ok(()) };
    // Debian's build of 7.2 lacks the accelerator that executes no instruction.
    let machine = || machine(&root).accelerator(Accelerator::Tcg);
    let source = machine().spawn()?;
    let socket = source.operator_socket();

    let plan: Value =
        serde_json::from_str(&sterna_does(&["plan", text(&socket), "--bandwidth", "1GB/s", "--json"])?)
            .map_err(|error| error.to_string())?;

    let curve = plan["inputs"]["dirty"]["curve"].as_array().cloned().unwrap_or_default();
    assert_eq!(curve.len(), 1, "{plan}");
    assert!(plan["assumed"].to_string().contains("whole seconds"), "{plan}");
    let image = source.directory().join("image");
    sterna_does(&["save", text(&socket), text(&image)])?;
    let mut target = machine().incoming_defer().spawn()?;
    // 7.2 uses its preempt channel differently from later releases, so this restore has none.
    sterna_does(&["restore", text(&image), text(&target.operator_socket()), "--lazy"])?;
    assert_eq!(target.status()?, "running");
    Ok(())
}
