//! Whether the times of a pod's deletion fit together.
//!
//! Kubelet runs the preStop hook, sends SIGTERM to the containers' inits when it is over, and SIGKILL
//! to what is left when `terminationGracePeriodSeconds` are over, counted from before the hook (pod
//! lifecycle, "Termination of Pods"). lastgasp drains from SIGTERM on, for its drain window, and then
//! hands streams over. The engine ends its own streams some time after SIGTERM. `docs/pod-deletion.md`
//! draws it.

use std::time::Duration;

use super::error::{Place, Problem};
use super::{Config, WorkerConfig};

/// What is left to streams that are handed over until their engine may end: the signal, the request
/// to another worker, and its first token.
pub const HANDOVER: Duration = Duration::from_secs(1);

/// Two times that do not fit, all counted from the deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// The hook takes all the time there is.
    #[error("the preStop hook takes {}, and {} after the deletion comes SIGKILL: nothing drains", s(.pre_stop), s(.grace))]
    NoTimeToDrain {
        /// `terminationGracePeriodSeconds`.
        grace: Duration,
        /// How long the hook takes.
        pre_stop: Duration,
    },
    /// The engine is killed while its streams still drain.
    #[error(
        "streams are handed over {} after the deletion (preStop {} + drain window {}), and at {} comes SIGKILL: what \
         cannot be moved is cut", s(&(*.pre_stop + *.window)), s(.pre_stop), s(.window), s(.grace)
    )]
    KilledBeforeHandover {
        /// `terminationGracePeriodSeconds`.
        grace: Duration,
        /// How long the hook takes.
        pre_stop: Duration,
        /// The drain window.
        window: Duration,
    },
    /// The engine is killed before it would end by itself.
    #[error(
        "the engine ends by itself {} after the deletion (preStop {} + shutdown timeout {}), and at {} comes SIGKILL", s(&(*.pre_stop + *.timeout)), s(.pre_stop), s(.timeout), s(.grace)
    )]
    KilledBeforeItEnds {
        /// `terminationGracePeriodSeconds`.
        grace: Duration,
        /// How long the hook takes.
        pre_stop: Duration,
        /// The engine's own.
        timeout: Duration,
    },
    /// The engine ends its streams before they are handed over.
    #[error(
        "the drain window is {}, but the engine ends its streams {} after SIGTERM: they are moved when it ends, not \
         handed over before", s(.window), s(.timeout)
    )]
    EndsBeforeHandover {
        /// The drain window.
        window: Duration,
        /// The engine's own.
        timeout: Duration,
    },
}

impl Misfit {
    /// What to set, and to what.
    #[must_use]
    pub fn fix(&self) -> String {
        let up = |duration: Duration| duration.as_millis().div_ceil(1000);
        match self {
            Self::NoTimeToDrain { pre_stop, .. } => {
                format!("shorten the hook, or set terminationGracePeriodSeconds to more than {}", up(*pre_stop))
            }
            Self::KilledBeforeHandover { grace, pre_stop, window } => {
                let more =
                    format!("set terminationGracePeriodSeconds to at least {}", up(*pre_stop + *window + HANDOVER));
                match grace.saturating_sub(*pre_stop + HANDOVER) {
                    Duration::ZERO => more,
                    room => format!("{more}, or drain_window_ms to at most {}", room.as_millis()),
                }
            }
            Self::KilledBeforeItEnds { pre_stop, timeout, .. } => {
                format!("set terminationGracePeriodSeconds to at least {}", up(*pre_stop + *timeout))
            }
            Self::EndsBeforeHandover { timeout, .. } => {
                format!("set drain_window_ms to at most {}, or let the engine wait longer", timeout.as_millis())
            }
        }
    }

    /// The setting that it is about.
    const fn setting(self) -> &'static str {
        match self {
            Self::NoTimeToDrain { .. } => "pre_stop_s",
            Self::KilledBeforeHandover { .. } | Self::KilledBeforeItEnds { .. } => "termination_grace_s",
            Self::EndsBeforeHandover { .. } => "drain_window_ms",
        }
    }
}

fn s(duration: &Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}

impl WorkerConfig {
    /// How long its engine lets streams go on after SIGTERM, where that is known.
    #[must_use]
    pub fn engine_timeout(&self) -> Option<Duration> {
        self.shutdown_timeout.or(self.profile.shutdown_grace)
    }

    /// What of its drain window, its pod's grace period and its engine's own timeout does not fit.
    #[must_use]
    pub fn misfits(&self) -> Vec<Misfit> {
        let (window, pre_stop) = (self.drain_window, self.pre_stop);
        let mut misfits = Vec::new();
        if let Some(timeout) = self.engine_timeout().filter(|timeout| window > *timeout) {
            misfits.push(Misfit::EndsBeforeHandover { window, timeout });
        }
        let Some(grace) = self.termination_grace else { return misfits };
        if pre_stop >= grace {
            misfits.push(Misfit::NoTimeToDrain { grace, pre_stop });
            return misfits;
        }
        if pre_stop + window + HANDOVER > grace {
            misfits.push(Misfit::KilledBeforeHandover { grace, pre_stop, window });
        }
        if let Some(timeout) = self.engine_timeout().filter(|timeout| pre_stop + *timeout > grace) {
            misfits.push(Misfit::KilledBeforeItEnds { grace, pre_stop, timeout });
        }
        misfits
    }
}

impl Config {
    /// The misfits of all workers that the configuration names, as warnings.
    #[must_use]
    pub fn misfits(&self) -> Vec<Problem> {
        let workers = self.workers.iter().enumerate();
        workers
            .flat_map(|(index, worker)| worker.misfits().into_iter().map(move |misfit| (index, misfit)))
            .map(|(index, misfit)| Problem {
                place: Place::Nowhere,
                path: format!("worker[{index}].{}", misfit.setting()),
                message: format!("{misfit}; {}", misfit.fix()),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of what does not fit: grace, preStop, shutdown timeout in seconds, window in ms.
    fn judged(grace: u64, pre_stop: u64, timeout: Option<u64>, window_ms: u64) -> Vec<String> {
        let timeout = timeout.map(|s| format!("shutdown_timeout_s = {s}\n")).unwrap_or_default();
        let text = format!(
            "node = \"n\"\n[[worker]]\nname = \"vllm-0\"\nendpoint = \"http://127.0.0.1:1\"\ntermination_grace_s = {grace}\n\
             pre_stop_s = {pre_stop}\ndrain_window_ms = {window_ms}\n{timeout}"
        );
        let (config, _) = Config::read(Some(("x.toml".as_ref(), &text)), [], &[]).unwrap();
        let settings = config.workers[0].misfits().into_iter().map(|misfit| misfit.setting().to_owned()).collect();
        assert_eq!(config.misfits().len(), config.workers[0].misfits().len());
        settings
    }

    /// The rows of the table in `docs/pod-deletion.md`, which this test reads.
    #[test]
    fn the_table_of_the_documentation_is_what_is_checked() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/pod-deletion.md");
        let page = std::fs::read_to_string(path).unwrap();
        let rows = page.split("<!-- checked: begin -->").nth(1).unwrap().split("<!-- checked: end -->").next().unwrap();
        let mut checked = 0;
        for row in rows.lines().filter(|row| row.starts_with("| ") && !row.starts_with("| grace")) {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            let number = |cell: &str| cell.parse::<u64>().ok();
            let said: Vec<&str> = cells[4].split(", ").filter(|word| *word != "fits").collect();
            let said: Vec<&str> = said.into_iter().map(|word| word.trim_matches('`')).collect();
            let found = judged(
                number(cells[0]).unwrap(),
                number(cells[1]).unwrap(),
                number(cells[2]),
                number(cells[3]).unwrap() * 1000,
            );
            assert_eq!(found, said, "{row}");
            checked += 1;
        }
        assert!(checked >= 6, "{checked} rows");
    }

    #[test]
    fn a_fix_fits() {
        let fits = |grace, pre_stop, timeout, window| judged(grace, pre_stop, timeout, window).is_empty();
        // 5 + 25 + 1
        assert!(!fits(30, 5, None, 25_000) && fits(31, 5, None, 25_000) && fits(30, 5, None, 24_000));
        let misfit = Misfit::KilledBeforeHandover {
            grace: Duration::from_secs(30),
            pre_stop: Duration::from_secs(5),
            window: Duration::from_secs(25),
        };
        let fix = "set terminationGracePeriodSeconds to at least 31, or drain_window_ms to at most 24000";
        assert_eq!(misfit.fix(), fix);
        assert!(misfit.to_string().contains("30 s after the deletion (preStop 5 s + drain window 25 s)"), "{misfit}");
    }

    #[test]
    fn without_a_grace_period_only_the_engine_is_held_against_the_window() {
        let text = "node = \"n\"\n[[worker]]\nname = \"v\"\nengine = \"vllm\"\nendpoint = \"http://127.0.0.1:1\"\n";
        let read = |text: &str| Config::read(Some(("x.toml".as_ref(), text)), [], &[]).unwrap().0.workers[0].misfits();
        assert!(read(text).is_empty());
        assert!(matches!(read(&format!("{text}drain_window_ms = 60000\n"))[..], [Misfit::EndsBeforeHandover { .. }]));
        let longer = format!("{text}drain_window_ms = 60000\nshutdown_timeout_s = 60\n");
        assert!(read(&longer).is_empty());
    }
}
