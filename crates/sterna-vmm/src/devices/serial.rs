//! Section `serial`, version 1: the console's UART.
//!
//! | field | content |
//! | --- | --- |
//! | `regs` | nine bytes: divisor low and high, IER, IIR, LCR, LSR, MCR, MSR, scratch |
//! | `fifo` | received bytes that the guest has not read, at most 64 |

use std::sync::Arc;

use sterna::{Device, VmError};
use vm_superio::serial::{NoEvents, Serial, SerialState};

use super::codec::{Body, Fields, StateError, length};
use super::context::Context;

const FIFO_BYTES: usize = 64;

pub(crate) struct SerialConsole(pub(crate) Arc<Context>);

impl Device for SerialConsole {
    fn name(&self) -> String {
        "serial".into()
    }

    fn version(&self) -> u32 {
        1
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        let state = self.0.hardware.bus.serial().state();
        let mut body = Body::default();
        body.bytes(*b"regs", &registers(&state));
        body.bytes(*b"fifo", &state.in_buffer);
        Ok(body.finish())
    }

    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        self.0.load(self, body, |fields| load(&self.0, fields))
    }

    fn body_limit(&self) -> usize {
        4096
    }
}

fn registers(state: &SerialState) -> [u8; 9] {
    [
        state.baud_divisor_low,
        state.baud_divisor_high,
        state.interrupt_enable,
        state.interrupt_identification,
        state.line_control,
        state.line_status,
        state.modem_control,
        state.modem_status,
        state.scratch,
    ]
}

fn load(context: &Context, fields: &mut Fields<'_>) -> Result<(), StateError> {
    let (regs, fifo) = (fields.bytes(*b"regs")?, fields.bytes(*b"fifo")?);
    let regs: [u8; 9] = regs.try_into().map_err(|_| length(*b"regs", regs.len(), 9))?;
    if fifo.len() > FIFO_BYTES {
        return Err(length(*b"fifo", fifo.len(), "0 to 64"));
    }
    if regs[2] & 0xf0 != 0 {
        return Err(StateError::value(
            *b"regs",
            format!("interrupt enable {:#x} has reserved bits", regs[2]),
        ));
    }
    let state = SerialState {
        baud_divisor_low: regs[0],
        baud_divisor_high: regs[1],
        interrupt_enable: regs[2],
        interrupt_identification: regs[3],
        line_control: regs[4],
        line_status: regs[5],
        modem_control: regs[6],
        modem_status: regs[7],
        scratch: regs[8],
        in_buffer: fifo.to_vec(),
    };
    let (trigger, console) = context.hardware.bus.serial_parts();
    let device = Serial::from_state(&state, trigger, NoEvents, console)
        .map_err(|error| StateError::value(*b"regs", format!("{error:?}")))?;
    *context.hardware.bus.serial() = device;
    Ok(())
}
