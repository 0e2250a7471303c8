//! The report as a person reads it.

use lastgasp_protocol::ClosedName as _;
use std::fmt::Write as _;

use super::{Finding, Grade, Report};
use crate::status::render::{BOLD, DIM, GREEN, RED, Style, YELLOW, clean};

const fn word(grade: Grade) -> (&'static str, &'static str) {
    match grade {
        Grade::Fine => ("ok", GREEN),
        Grade::Note => ("note", DIM),
        Grade::Degraded => ("degraded", YELLOW),
        Grade::Broken => ("broken", RED),
    }
}

/// Findings by area, aligned, and the grade at the end.
#[must_use]
pub fn text(report: &Report, style: Style) -> String {
    let Report { grade, findings } = report;
    let width = |of: &dyn Fn(&Finding) -> usize| findings.iter().map(of).max().unwrap_or(0);
    let name_width = width(&|finding| clean(&finding.name).chars().count());
    let word_width = width(&|finding| word(finding.grade).0.len());
    let mut out = String::new();
    let mut area = None;
    for Finding { area: of, name, grade, detail, fix } in findings {
        if area != Some(*of) {
            let gap = if area.is_none() { "" } else { "\n" };
            let _ = writeln!(out, "{gap}{}", style.paint(BOLD, of.as_str()));
            area = Some(*of);
        }
        let (word, colour) = word(*grade);
        let word = style.paint(colour, &format!("{word:<word_width$}"));
        let _ = writeln!(out, "  {word}  {:<name_width$}  {}", clean(name), clean(detail));
        if let Some(fix) = fix {
            let _ = writeln!(out, "  {:word_width$}  {:name_width$}  to do: {}", "", "", clean(fix));
        }
    }
    let count = |of: Grade| findings.iter().filter(|finding| finding.grade == of).count();
    let grade = match grade {
        Grade::Fine | Grade::Note => style.paint(GREEN, "all fine"),
        Grade::Degraded => style.paint(YELLOW, &format!("works, but degraded: {}", counted(count(Grade::Degraded)))),
        Grade::Broken => style.paint(RED, &format!("does not work: {}", counted(count(Grade::Broken)))),
    };
    let _ = writeln!(out, "\ngrade: {grade}");
    out
}

fn counted(count: usize) -> String {
    match count {
        1 => "1 finding".to_owned(),
        _ => format!("{count} findings"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Area;
    use super::*;

    fn report() -> Report {
        Report::of(vec![
            Finding::new(Area::Kernel, "release", Grade::Fine, "Linux 6.18.44 x86_64"),
            Finding::new(Area::Kernel, "lockdown", Grade::Note, "not known"),
            Finding::new(Area::Sensors, "ebpf", Grade::Degraded, "not permitted").fix("give it CAP_BPF"),
            Finding::new(Area::Nats, "server", Grade::Broken, "refused \u{1b}[2J"),
        ])
    }

    #[test]
    fn a_person_sees_aligned_findings_and_a_verdict() {
        assert_eq!(
            text(&report(), Style::Plain),
            "\
kernel
  ok        release   Linux 6.18.44 x86_64
  note      lockdown  not known

sensors
  degraded  ebpf      not permitted
                      to do: give it CAP_BPF

nats
  broken    server    refused \u{fffd}[2J

grade: does not work: 1 finding
"
        );
    }

    #[test]
    fn colours_are_for_terminals() {
        assert!(!text(&report(), Style::Plain).contains('\u{1b}'));
        assert!(text(&report(), Style::Coloured).contains("\u{1b}[33mdegraded"));
    }
}
