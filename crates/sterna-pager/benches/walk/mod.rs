//! Measures restores of Cloud Hypervisor's machines: all memory before, and the VMM's walk through empty memory.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_image::convert::ConvertOptions;
use sterna_pager::cloud_hypervisor::{Restore, RestorePlan, Save, SavePlan, SavedMachine};
use sterna_store::StoredImage;
use sterna_uffd_peer::PAGE;
use sterna_uffd_peer::cloud_hypervisor::{Machine, OK, Receiver, Sender, command};

use crate::{Failure, MIB};

/// Prints the figures of a machine with this memory.
pub fn run(bytes: u64) -> Result<(), Failure> {
    let directory = tempfile::tempdir()?;
    let (image, socket) = (directory.path().join("vm.sterna"), directory.path().join("ch.sock"));
    let machine = Machine::new(bytes / 2, bytes / 2);
    let took = save(&machine, &image, &socket)?;
    let rate = |took: Duration| bytes as f64 / MIB as f64 / took.as_secs_f64();
    println!("Cloud Hypervisor: a machine of {} MiB is saved with {:.0} MiB/s", bytes / MIB, rate(took));
    let open = || -> Result<_, Failure> {
        Ok(Arc::new(SavedMachine::new(&StoredImage::open(&image, None)?, 64 * MIB)?))
    };
    let vmm = Receiver::bind(&socket, false)?;
    let began = Instant::now();
    let restore = Restore::start(open()?, RestorePlan::new(socket.clone()))?;
    vmm.accept()?;
    println!("Cloud Hypervisor: it is restored with {:.0} MiB/s before it runs", rate(began.elapsed()));
    drop(restore);
    std::fs::remove_file(&socket)?;
    let vmm = Receiver::bind(&socket, true)?;
    let began = Instant::now();
    let plan = RestorePlan { is_lazy: true, ..RestorePlan::new(socket.clone()) };
    let restore = Restore::start(open()?, plan)?;
    let mut arrived = vmm.accept()?;
    println!("Cloud Hypervisor: it runs after {:.1} ms with --lazy", began.elapsed().as_secs_f64() * 1e3);
    let (began, mut times) = (Instant::now(), Vec::new());
    for slot in &machine.slots {
        for page in 0..slot.bytes / PAGE {
            let asked = Instant::now();
            let status = arrived.request(slot.address + page * PAGE, PAGE)?;
            if status != Some(OK) {
                return Err(format!("a request got {status:?}").into());
            }
            times.push(asked.elapsed());
        }
    }
    let took = began.elapsed();
    arrived.faults = None;
    while !restore.statistics().is_over() {
        std::thread::sleep(Duration::from_millis(1));
    }
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    println!(
        "Cloud Hypervisor: the walk takes {:.2} s: {:.0} requests/s, p50 {:.1} µs, p99 {:.0} µs, longest {:.0} µs",
        took.as_secs_f64(),
        times.len() as f64 / took.as_secs_f64(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
    Ok(())
}

/// Saves the machine, and returns the time from the end of the state to the answer.
fn save(machine: &Machine, image: &Path, socket: &Path) -> Result<Duration, Failure> {
    let (image, options) = (image.to_owned(), ConvertOptions::default());
    let save = Save::start(SavePlan { socket: socket.to_owned(), image, options })?;
    let vmm = Sender::connect(socket)?;
    vmm.begin(machine)?;
    let began = Instant::now();
    let status = vmm.request(command::COMPLETE, &[], &[])?;
    let took = began.elapsed();
    drop(save);
    if status == Some(OK) { Ok(took) } else { Err(format!("the save got {status:?}").into()) }
}
