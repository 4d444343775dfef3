//! The process guest as a machine: threads that write RAM, for hosts without /dev/kvm.

use sterna::VmError;
use sterna_guests::{ProcessConfig, ProcessGuest, Tracking, Verdict};

use super::build::{blocks, cannot_build};
use super::config::Config;
use super::machine::{Guest, GuestProgress, Machine, Parts};
use crate::exit::Stop;
use crate::units::PAGE_BYTES;

/// Builds the machine; a guest that boots here is still paused.
pub fn process_machine(config: Config) -> Result<Parts, Stop> {
    let Config { machine, load } = config;
    if machine.dirty_ring_size.is_some() {
        return Err(Stop::usage(
            "`--dirty-ring-size` is for the KVM machine; leave it out for the process machine.",
        ));
    }
    if !machine.vfio_user.is_empty() {
        return Err(Stop::usage(
            "`--vfio-user` is for the KVM machine; leave it out for the process machine.",
        ));
    }
    if !machine.vhost_user.is_empty() {
        return Err(Stop::usage(
            "`--vhost-user` is for the KVM machine; leave it out for the process machine.",
        ));
    }
    let says_what_is_free = machine.free_page_reporting || machine.free_page_hinting;
    let has_virtio = machine.entropy || says_what_is_free || machine.virtio_console;
    if has_virtio || !machine.disks.is_empty() || !machine.nets.is_empty() {
        return Err(Stop::usage(
            "`--disk`, `--net`, `--rng`, `--virtio-console`, `--free-page-reporting` and `--free-page-hinting` are for the KVM machine; leave them out for the process machine.",
        ));
    }
    let workers = usize::from(machine.vcpus);
    let each = |bytes: u64| (bytes / PAGE_BYTES / workers.max(1) as u64).max(1);
    let process = ProcessConfig {
        name: machine.name,
        uuid: machine.uuid,
        blocks: blocks(machine.ram_bytes),
        backing: machine.backing,
        // A lazy restore and a live save register the memory with a userfaultfd, which a dirty log would exclude.
        tracking: Tracking::Software,
        rate: load.rate,
        workers,
        pattern: load.pattern,
        working_set_pages: load.working_set_bytes.map(each),
        fill: load.fill,
        ..ProcessConfig::default()
    };
    let guest = if machine.incoming { ProcessGuest::waiting(process) } else { ProcessGuest::boot(process) };
    let guest = guest.map_err(|error| cannot_build("process", error))?;
    Ok(Parts { machine: guest.clone(), guest: Some(guest) })
}

impl Machine for ProcessGuest {
    fn pause(&self) -> Result<(), VmError> {
        ProcessGuest::pause(self)
    }
    fn cont(&self) -> Result<(), VmError> {
        ProcessGuest::cont(self)
    }
    fn end(&self) {
        ProcessGuest::quit(self);
    }
    fn has_guest(&self) -> bool {
        ProcessGuest::has_guest(self)
    }
    fn name(&self) -> String {
        ProcessGuest::name(self).to_owned()
    }
    fn uses_kvm(&self) -> bool {
        false
    }
}

impl Guest for ProcessGuest {
    fn check(&self) -> Result<Verdict, String> {
        ProcessGuest::check(self).map_err(|error| error.to_string())
    }
    fn progress(&self) -> Result<GuestProgress, String> {
        let progress = ProcessGuest::progress(self);
        Ok(GuestProgress {
            longest_gap_seconds: Some(progress.max_gap.as_secs_f64()),
            steps: progress.steps,
            beats: progress.beats,
            pages_per_second: None,
        })
    }
    fn set_rate(&self, pages_per_second: u64) -> Result<(), String> {
        ProcessGuest::set_rate(self, pages_per_second);
        Ok(())
    }
    fn reset_gap(&self) -> Result<(), String> {
        self.reset_max_gap();
        Ok(())
    }
}
