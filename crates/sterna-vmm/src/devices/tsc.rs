//! Saves and loads the time-stamp counters. Each is saved with the time of its reading, and loaded as if it
//! had ticked ever since ([`super`], *Time*).
//!
//! vCPU 0's counter is set by the clock. If the kernel offers KVM_VCPU_TSC_OFFSET, the other vCPUs get
//! exactly the distance from vCPU 0 that they had at the source. Otherwise each is set by the clock too, and
//! the kernel makes counters equal that are written within a second. The result is read back, because a
//! kernel may offer the call and ignore it.

use std::ops::Range;

use kvm_ioctls::VcpuFd;

use super::codec::{Body, Fields, StateError, length};
use super::msrs;
use super::realtime::{at_once, passed_ns};
use crate::kvm;

/// A TSC value, and the time of its reading.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading {
    tsc: u64,
    realtime_ns: u64,
    /// The guest's counter minus the host's, if the kernel offers it.
    offset: Option<u64>,
}

/// Offsets of vCPU 0 at the source and on this host. The other vCPUs are set relative to them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TscAnchor {
    source: Option<u64>,
    here: Option<u64>,
}

pub(crate) fn save(fd: &VcpuFd, body: &mut Body) -> Result<(), StateError> {
    let missing = || StateError::value(*b"tsc ", "the kernel cannot read the TSC");
    let reading = read(fd).ok_or_else(missing)?;
    body.u64(*b"tsc ", reading.tsc);
    body.u64(*b"real", reading.realtime_ns);
    if let Some(offset) = reading.offset {
        body.u64(*b"tsco", offset);
    }
    Ok(())
}

pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Reading, StateError> {
    let (tsc, realtime_ns) = (fields.u64(*b"tsc ")?, fields.u64(*b"real")?);
    let offset = match fields.optional(*b"tsco") {
        None => None,
        Some(bytes) => {
            Some(u64::from_le_bytes(bytes.try_into().map_err(|_| length(*b"tsco", bytes.len(), 8))?))
        }
    };
    Ok(Reading { tsc, realtime_ns, offset })
}

/// Sets a vCPU's counter. `anchor` is vCPU 0's; None for vCPU 0 itself.
pub(crate) fn load(
    fd: &VcpuFd,
    saved: Reading,
    khz: u32,
    anchor: Option<TscAnchor>,
) -> Result<TscAnchor, StateError> {
    if let (Some(TscAnchor { source: Some(source), here: Some(here) }), Some(offset)) = (anchor, saved.offset)
    {
        let ours = here.wrapping_add(offset.wrapping_sub(source));
        if kvm::set_tsc_offset(fd, ours).is_ok() && is_near(fd, saved, khz) {
            return Ok(TscAnchor { source: Some(offset), here: Some(ours) });
        }
    }
    if let Some(here) = set_by_offset(fd, saved, khz) {
        return Ok(TscAnchor { source: saved.offset, here: Some(here) });
    }
    if !kvm::write_msr(fd, msrs::TSC, expected(saved, khz)) {
        return Err(StateError::value(*b"tsc ", "the kernel refuses to set the TSC"));
    }
    if !is_near(fd, saved, khz) {
        let read = kvm::read_msr(fd, msrs::TSC);
        let why = format!("set to {:#x}, the TSC reads {read:x?}", expected(saved, khz));
        return Err(StateError::value(*b"tsc ", why));
    }
    Ok(TscAnchor { source: None, here: None })
}

/// Adjusts the offset by the counter's error. None if the kernel cannot do so, or ignores the call.
fn set_by_offset(fd: &VcpuFd, saved: Reading, khz: u32) -> Option<u64> {
    let offset = kvm::tsc_offset(fd).ok()?;
    let now = read(fd)?;
    let wanted = at(saved, khz, now.realtime_ns.saturating_sub(saved.realtime_ns));
    let ours = offset.wrapping_add(wanted.wrapping_sub(now.tsc));
    kvm::set_tsc_offset(fd, ours).ok()?;
    is_near(fd, saved, khz).then_some(ours)
}

/// The value that the counter should have now.
fn expected(saved: Reading, khz: u32) -> u64 {
    at(saved, khz, passed_ns(saved.realtime_ns))
}

fn at(saved: Reading, khz: u32, passed_ns: u64) -> u64 {
    let ticks = u128::from(passed_ns) * u128::from(khz) / 1_000_000;
    saved.tsc.wrapping_add(ticks as u64)
}

/// Whether the counter is within 100 ms of its expected value. The tolerance is needed because this thread
/// may be preempted.
fn is_near(fd: &VcpuFd, saved: Reading, khz: u32) -> bool {
    let slack = u64::from(khz) * 100;
    let before = expected(saved, khz);
    let Some(read) = kvm::read_msr(fd, msrs::TSC) else { return false };
    let window: Range<u64> = 0..expected(saved, khz).wrapping_sub(before).wrapping_add(2 * slack);
    window.contains(&read.wrapping_sub(before.wrapping_sub(slack)))
}

fn read(fd: &VcpuFd) -> Option<Reading> {
    let offset = kvm::tsc_offset(fd).ok();
    let (tsc, realtime_ns) = at_once(|| kvm::read_msr(fd, msrs::TSC).ok_or(())).ok()?;
    Some(Reading { tsc, realtime_ns, offset })
}
