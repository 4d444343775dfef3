//! Faults that a test plans in advance.

use crate::rdma::CompletionStatus;

/// Event at which a planned fault happens. Counting starts at the call of [`super::Network::plan`], for each host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trigger {
    /// Instead of the nth registration; the first is 1.
    Registration(u64),
    /// Instead of the host's nth send or write; the first is 1.
    Request(u64),
}

/// Kind of a planned fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The call or the request fails. A registration fails with this error number of the kernel (ENOMEM, EINVAL);
    /// a request fails as if the peer's adapter had failed.
    Errno(i32),
    /// The request completes with this status, and both queue pairs enter the error state.
    Status(CompletionStatus),
    /// The host's process ends, as with [`super::Network::kill`].
    Kill,
    /// The host loses its link, as with [`super::Network::set_link`] and `false`.
    LinkDown,
    /// The host's device is removed, as with [`super::Network::remove_device`].
    RemoveDevice,
}

/// The faults of one host that have not happened yet.
#[derive(Debug, Default)]
pub(super) struct Plan {
    faults: Vec<(Trigger, Fault)>,
}

impl Plan {
    pub(super) fn add(&mut self, trigger: Trigger, fault: Fault) {
        self.faults.push((trigger, fault));
    }

    /// Counts a registration; returns the fault to apply instead.
    pub(super) fn registration(&mut self) -> Option<Fault> {
        self.count(|trigger| match trigger {
            Trigger::Registration(left) => Some(left),
            Trigger::Request(_) => None,
        })
    }

    /// Counts a request; returns the fault to apply instead.
    pub(super) fn request(&mut self) -> Option<Fault> {
        self.count(|trigger| match trigger {
            Trigger::Request(left) => Some(left),
            Trigger::Registration(_) => None,
        })
    }

    fn count(&mut self, of_kind: impl Fn(&mut Trigger) -> Option<&mut u64>) -> Option<Fault> {
        let mut due = None;
        for (at, (trigger, _)) in self.faults.iter_mut().enumerate() {
            let Some(left) = of_kind(trigger) else { continue };
            *left = left.saturating_sub(1);
            if *left == 0 && due.is_none() {
                due = Some(at);
            }
        }
        due.map(|at| self.faults.remove(at).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_counts_each_kind_by_itself() {
        let mut plan = Plan::default();
        plan.add(Trigger::Registration(2), Fault::Errno(12));
        plan.add(Trigger::Request(1), Fault::Kill);

        assert_eq!(plan.registration(), None);
        assert_eq!(plan.request(), Some(Fault::Kill));
        assert_eq!(plan.registration(), Some(Fault::Errno(12)));
        assert_eq!((plan.request(), plan.registration()), (None, None));
    }
}
