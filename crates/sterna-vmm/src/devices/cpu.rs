//! Section `cpu`, one instance per vCPU, version 1: the complete state of a vCPU.
//!
//! | field | content | present |
//! | --- | --- | --- |
//! | `regs` | `kvm_regs` | always |
//! | `sre2` or `sreg` | `kvm_sregs2`, or `kvm_sregs` from kernels before 5.14 | one of them |
//! | `xsav` | the xsave area, all of KVM_CAP_XSAVE2's bytes (x87, SSE, AVX, AVX-512, AMX …) | if offered |
//! | `xcrs` | `kvm_xcrs` | if offered |
//! | `msrs` | every MSR the kernel knows: index u32, value u64 ([`super::msrs`]) | always |
//! | `tsc `, `real`, `tsco` | the TSC and when it was read ([`super::tsc`]) | `tsco` if offered |
//! | `tkhz` | the TSC's frequency in kHz, u64 | always |
//! | `lapc` | `kvm_lapic_state` | always |
//! | `tscd` | the LAPIC's deadline in guest TSC ticks, u64 | if offered |
//! | `evnt` | `kvm_vcpu_events` | always |
//! | `mpst` | the run state as a u64 (0 runnable, 1 uninitialised, 2 INIT received, 3 halted, 4 SIPI received) | always |
//! | `dreg` | `kvm_debugregs` | if offered |
//!
//! It is an error if this kernel has no call for a field that the source sent, because state would be lost.
//!
//! Order of loading:
//!
//! - Segment and control registers come before the LAPIC, because they contain its base.
//! - They also come before xcrs and xsave, because CR4 permits those.
//! - The TSC comes before the deadline, which is measured in it.
//! - The LAPIC comes before the deadline, which counts in the LAPIC's mode.
//! - The general registers come last.

use std::sync::Arc;

use kvm_bindings::{
    kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs, kvm_sregs2, kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::VcpuFd;
use sterna::{Device, VmError};

use super::codec::{Body, Fields, StateError, kernel, length};
use super::context::{Context, saving};
use super::tsc::Reading;
use super::{msrs, tsc};
use crate::kvm;

/// Frequency difference up to which KVM needs no TSC scaling: 250 ppm.
const TSC_TOLERANCE_PPM: u64 = 250;

pub(crate) struct Cpu {
    pub(crate) context: Arc<Context>,
    pub(crate) index: usize,
}

impl Device for Cpu {
    fn name(&self) -> String {
        "cpu".into()
    }

    fn instance(&self) -> u32 {
        self.index as u32
    }

    fn version(&self) -> u32 {
        1
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        saving(self, save(&self.context, self.index))
    }

    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        self.context.load(self, body, |fields| {
            let state = VcpuState::parse(&self.context, fields)?;
            fields.finish()?;
            state.apply(&self.context, self.index)
        })
    }

    fn body_limit(&self) -> usize {
        1 << 20
    }
}

fn save(context: &Context, index: usize) -> Result<Vec<u8>, StateError> {
    let (fd, caps) = (&*context.vcpus.fd(index), &context.hardware.caps);
    let mut body = Body::default();
    // Must be the first call: it makes the kernel process pending INITs and SIPIs.
    let mp_state = fd.get_mp_state().map_err(kernel("KVM_GET_MP_STATE"))?;
    body.u64(*b"mpst", mp_state.mp_state.into());
    body.plain(*b"regs", &fd.get_regs().map_err(kernel("KVM_GET_REGS"))?);
    if caps.sregs2 {
        body.plain(*b"sre2", &kvm::get_sregs2(fd).map_err(kernel("KVM_GET_SREGS2"))?);
    } else {
        body.plain(*b"sreg", &fd.get_sregs().map_err(kernel("KVM_GET_SREGS"))?);
    }
    if caps.xsave {
        let area =
            kvm::get_xsave(fd, caps.xsave2_bytes, caps.xsave2_bytes > 0).map_err(kernel("KVM_GET_XSAVE2"))?;
        body.bytes(*b"xsav", &area);
    }
    if caps.xcrs {
        body.plain(*b"xcrs", &fd.get_xcrs().map_err(kernel("KVM_GET_XCRS"))?);
    }
    body.bytes(*b"msrs", &msrs::save(fd, &context.hardware.msrs)?);
    tsc::save(fd, &mut body)?;
    body.u64(*b"tkhz", context.hardware.tsc_khz.into());
    body.plain(*b"lapc", &fd.get_lapic().map_err(kernel("KVM_GET_LAPIC"))?);
    if let Some(deadline) = kvm::read_msr(fd, msrs::TSC_DEADLINE) {
        body.u64(*b"tscd", deadline);
    }
    body.plain(*b"evnt", &fd.get_vcpu_events().map_err(kernel("KVM_GET_VCPU_EVENTS"))?);
    if caps.debugregs {
        body.plain(*b"dreg", &fd.get_debug_regs().map_err(kernel("KVM_GET_DEBUGREGS"))?);
    }
    Ok(body.finish())
}

/// A decoded and checked body, not yet loaded into the vCPU.
struct VcpuState<'a> {
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs2: Option<kvm_sregs2>,
    sregs: Option<kvm_sregs>,
    xsave: Option<&'a [u8]>,
    xcrs: Option<kvm_xcrs>,
    msrs: &'a [u8],
    tsc: Reading,
    tsc_khz: u32,
    lapic: kvm_lapic_state,
    deadline: Option<u64>,
    events: kvm_vcpu_events,
    debugregs: Option<kvm_debugregs>,
}

impl<'a> VcpuState<'a> {
    fn parse(context: &Context, fields: &mut Fields<'a>) -> Result<Self, StateError> {
        let caps = &context.hardware.caps;
        let mp_state = fields.u64(*b"mpst")?;
        if mp_state > 4 {
            return Err(StateError::value(*b"mpst", format!("{mp_state} is not a run state")));
        }
        let (sregs2, sregs) = (fields.optional_plain(*b"sre2")?, fields.optional_plain(*b"sreg")?);
        if sregs2.is_some() == sregs.is_some() {
            return Err(StateError::value(*b"sre2", "exactly one of sre2 and sreg must be present"));
        }
        let xsave = fields.optional(*b"xsav");
        let most = caps.xsave2_bytes.max(4096);
        if let Some(area) = xsave.filter(|area| area.len() < 576 || area.len() > most) {
            return Err(length(*b"xsav", area.len(), format!("576 to {most}")));
        }
        let state = Self {
            mp_state: kvm_mp_state { mp_state: mp_state as u32 },
            regs: fields.plain(*b"regs")?,
            sregs2,
            sregs,
            xsave,
            xcrs: fields.optional_plain(*b"xcrs")?,
            msrs: fields.bytes(*b"msrs")?,
            tsc: tsc::parse(fields)?,
            tsc_khz: check_khz(context, fields.u64(*b"tkhz")?)?,
            lapic: fields.plain(*b"lapc")?,
            deadline: fields.optional(*b"tscd").map(|bytes| u64_of(*b"tscd", bytes)).transpose()?,
            events: fields.plain(*b"evnt")?,
            debugregs: fields.optional_plain(*b"dreg")?,
        };
        for (tag, here, there) in [
            (*b"sre2", caps.sregs2, state.sregs2.is_some()),
            (*b"xsav", caps.xsave, state.xsave.is_some()),
            (*b"xcrs", caps.xcrs, state.xcrs.is_some()),
            (*b"dreg", caps.debugregs, state.debugregs.is_some()),
        ] {
            if there && !here {
                return Err(StateError::value(tag, "this kernel cannot load it"));
            }
        }
        if let Some(xcrs) = state.xcrs.filter(|xcrs| xcrs.nr_xcrs as usize > xcrs.xcrs.len()) {
            return Err(StateError::value(*b"xcrs", format!("{} registers", xcrs.nr_xcrs)));
        }
        Ok(state)
    }

    fn apply(&self, context: &Context, index: usize) -> Result<(), StateError> {
        let (fd, caps) = (&*context.vcpus.fd(index), &context.hardware.caps);
        if self.tsc_khz != context.hardware.tsc_khz && caps.tsc_control {
            fd.set_tsc_khz(self.tsc_khz).map_err(kernel("KVM_SET_TSC_KHZ"))?;
        }
        match (&self.sregs2, &self.sregs) {
            (Some(sregs), _) => kvm::set_sregs2(fd, sregs).map_err(kernel("KVM_SET_SREGS2"))?,
            (None, Some(sregs)) => fd.set_sregs(sregs).map_err(kernel("KVM_SET_SREGS"))?,
            (None, None) => {}
        }
        if let Some(xcrs) = &self.xcrs {
            fd.set_xcrs(xcrs).map_err(kernel("KVM_SET_XCRS"))?;
        }
        if let Some(area) = self.xsave {
            kvm::set_xsave(fd, area, caps.xsave2_bytes).map_err(kernel("KVM_SET_XSAVE"))?;
        }
        msrs::load(fd, *b"msrs", self.msrs, &context.hardware.msrs)?;
        self.apply_time(context, fd, index)?;
        fd.set_mp_state(self.mp_state).map_err(kernel("KVM_SET_MP_STATE"))?;
        fd.set_vcpu_events(&self.events).map_err(kernel("KVM_SET_VCPU_EVENTS"))?;
        if let Some(debugregs) = &self.debugregs {
            fd.set_debug_regs(debugregs).map_err(kernel("KVM_SET_DEBUGREGS"))?;
        }
        fd.set_regs(&self.regs).map_err(kernel("KVM_SET_REGS"))
    }

    fn apply_time(&self, context: &Context, fd: &VcpuFd, index: usize) -> Result<(), StateError> {
        let first = if index == 0 { None } else { context.loading().tsc };
        let anchor = tsc::load(fd, self.tsc, self.tsc_khz, first)?;
        if index == 0 {
            context.loading().tsc = Some(anchor);
        }
        fd.set_lapic(&self.lapic).map_err(kernel("KVM_SET_LAPIC"))?;
        if let Some(deadline) = self.deadline
            && !kvm::write_msr(fd, msrs::TSC_DEADLINE, deadline)
            && deadline != 0
        {
            return Err(StateError::value(*b"tscd", "this kernel cannot load it"));
        }
        Ok(())
    }
}

fn u64_of(tag: super::codec::Tag, bytes: &[u8]) -> Result<u64, StateError> {
    bytes.try_into().map(u64::from_le_bytes).map_err(|_| length(tag, bytes.len(), 8))
}

/// The source's TSC frequency, if this host can run the guest at it.
pub(crate) fn check_khz(context: &Context, theirs: u64) -> Result<u32, StateError> {
    let ours = u64::from(context.hardware.tsc_khz);
    let near = theirs.abs_diff(ours).saturating_mul(1_000_000) <= ours * TSC_TOLERANCE_PPM;
    match u32::try_from(theirs) {
        Ok(khz) if khz > 0 && (near || context.hardware.caps.tsc_control) => Ok(khz),
        _ => Err(StateError::Mismatch {
            what: "TSC frequency in kHz".into(),
            theirs: theirs.to_string(),
            ours: format!("{ours}, which it cannot scale"),
        }),
    }
}
